"""Losses of deferred logits whose labels are none of one class a row: what torch has, errors included."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.heads import WORDS, compared, deferred, head_of, labels, linear, states


def given(function, logits):
    return logits if function is F.cross_entropy else logits.log_softmax(-1)


@pytest.mark.parametrize("function", [F.cross_entropy, F.nll_loss])
def test_logits_of_rows_with_flat_labels_are_torchs_error(function):
    """There are as many labels as rows of words, but nothing says that they are in this order."""
    for logits in (linear()(states()), deferred(head_of(linear()), states())):
        with pytest.raises(ValueError, match="to match target batch_size"):
            function(given(function, logits), labels().flatten())


@pytest.mark.parametrize("function", [F.cross_entropy, F.nll_loss])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_labels_of_another_dtype_are_torchs_error(function, dtype):
    for logits in (linear()(states()), deferred(head_of(linear()), states())):
        with pytest.raises(RuntimeError):
            function(given(function, logits.flatten(0, 1)), labels().flatten().to(dtype))


def test_shares_of_words_are_read_by_torch():
    """A label for each word, not for each row."""
    shares = torch.linspace(0, 1, WORDS).expand(10, WORDS).double()
    ours, theirs, head = compared(lambda logits, _: F.cross_entropy(logits.flatten(0, 1), shares)[None])
    torch.testing.assert_close(ours, theirs)
    assert head.made == 1
