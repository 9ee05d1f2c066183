"""What is taken of each row of logits, a logsumexp or a picked value, and views of it: recorded, without logits."""

import pytest
import torch

from tests.support.heads import ROWS, TOKENS, compared, deferred, head_of, labels, linear, states
from tunecompile.runtime.loss_head.deferred import LazyTensor, recipe_of
from tunecompile.runtime.loss_head.log_probs import RowReduction


def logsumexp(logits, labels):
    return logits.logsumexp(-1, keepdim=True)


def picked(logits, labels):
    return logits.gather(-1, labels[..., None])


VIEWS = {
    "reshape": (lambda taken: taken.reshape(TOKENS, ROWS), (TOKENS, ROWS)),
    "view": (lambda taken: taken.view(-1), (ROWS * TOKENS,)),
    "unsqueeze": (lambda taken: torch.unsqueeze(taken, 1), (ROWS, 1, TOKENS, 1)),
    "flatten, named": (lambda taken: taken.flatten(start_dim=0, end_dim=1), (ROWS * TOKENS, 1)),
    "clone": (lambda taken: taken.clone(), (ROWS, TOKENS, 1)),
    "two": (lambda taken: taken.flatten().unsqueeze(0), (1, ROWS * TOKENS)),
}


@pytest.mark.parametrize("take", [logsumexp, picked])
@pytest.mark.parametrize("name", VIEWS)
def test_values_and_gradients_are_torchs(take, name):
    view, shape = VIEWS[name]
    found = view(take(deferred(head_of(linear()), states()), labels()))
    recipe = recipe_of(found)
    assert isinstance(recipe, RowReduction) and recipe.real is None
    assert found.shape == recipe.meta.shape == shape and found.requires_grad
    ours, theirs, head = compared(lambda logits, given: view(take(logits, given)))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert ours[0].shape == shape and head.made == 1


@pytest.mark.parametrize("name", VIEWS)
def test_a_difference_of_views_makes_no_logits(name):
    view, _ = VIEWS[name]
    ours, theirs, head = compared(lambda logits, given: view(picked(logits, given)) - view(logsumexp(logits, given)))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert head.made == 0


def test_a_view_of_what_was_read_is_no_recipe():
    """It shares the memory of what was read."""
    taken = logsumexp(deferred(head_of(linear()), states()), labels())
    real = recipe_of(taken).materialize()
    view = taken.flatten()
    assert not isinstance(view, LazyTensor) and view.data_ptr() == real.data_ptr() and view.shape == (ROWS * TOKENS,)


def test_a_view_of_their_bits_is_read():
    """It has numbers of another kind."""
    taken, real = (logsumexp(given, None) for given in (deferred(head_of(linear()), states()), linear()(states())))
    bits = taken.view(torch.int64)
    assert not isinstance(bits, LazyTensor) and bits.dtype == torch.int64 and torch.equal(bits, real.view(torch.int64))


def test_a_view_without_gradients_is_not_trained():
    taken = picked(deferred(head_of(linear()), states()), labels())
    with torch.no_grad():
        view = taken.flatten()
        assert isinstance(view, LazyTensor) and not recipe_of(view).trained and not view.requires_grad
    assert recipe_of(taken.flatten()).trained
    with torch.no_grad():
        untrained = picked(deferred(head_of(linear()), states()), labels())
    assert not recipe_of(untrained.flatten()).trained


def test_a_copy_with_other_strides_has_them():
    def copy(taken):
        return taken.view(1, ROWS, TOKENS, 1).clone(memory_format=torch.channels_last)

    found, real = (
        copy(logsumexp(given, None)) for given in (deferred(head_of(linear()), states()), linear()(states()))
    )
    assert torch.equal(found + 0, real) and found.stride() == real.stride() == (found + 0).stride()


def test_a_view_that_does_not_fit_is_torchs_error():
    taken = picked(deferred(head_of(linear()), states()), labels())
    with pytest.raises(RuntimeError, match="invalid for input of size 10"):
        taken.view(7)


@pytest.mark.parametrize("function", [torch.log_softmax, torch.logsumexp, torch.gather])
def test_what_goes_into_a_tensor_of_the_callers_is_there_at_once(function):
    """It is read without another call on the logits."""
    given = (-1, labels()[..., None]) if function is torch.gather else (-1,)
    with torch.no_grad():
        expected = function(linear()(states()), *given)
        out = torch.zeros_like(expected)
        function(deferred(head_of(linear()), states()), *given, out=out)
    assert torch.equal(out, expected)


def test_a_logsumexp_of_log_probabilities_is_computed():
    """It is zero in each row, and no step to a loss."""
    found, _, _ = compared(lambda logits, given: logits.log_softmax(-1).logsumexp(-1))
    assert found[0].abs().max() < 1e-12
    taken = deferred(head_of(linear()), states()).log_softmax(-1).logsumexp(-1)
    assert not isinstance(taken, LazyTensor)
