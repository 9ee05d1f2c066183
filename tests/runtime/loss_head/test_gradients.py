"""Hooks on logits, and gradients that are kept or asked for there: as without `optimize`, or an error that says why not, but never silence."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_same_run
from tests.support.losses import LogSoftmax, Weaker
from tests.support.models.pairs import of_plain_layers, pair
from tunecompile.errors import NoGradient

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def logits_of(model: nn.Module) -> Tensor:
    return model(zoo.batch()["input_ids"]).logits


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), zoo.batch()["labels"].flatten())


def close(mine: list[Tensor], exact: list[Tensor]) -> bool:
    return len(mine) == len(exact) > 0 and all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(mine, exact))


def same(run: Callable[[nn.Module, list], Tensor]) -> None:
    """`run(model, seen)` is a loss whose backward pass leaves the same gradients at the weights, and in `seen`, with `optimize` and without."""
    seen: list[list[Tensor]] = [[], []]
    found = iter(seen)
    assert_same_run(*pair(of_plain_layers), lambda m: run(m, next(found)))
    assert close(*seen)


# -- before the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [False, True], ids=["alone", "beside the model's own loss"])
def test_a_hook_changes_the_gradient(labels):
    def run(m, seen):
        logits = m(**zoo.batch()).logits if labels else logits_of(m)
        logits.register_hook(lambda grad: (seen.append(grad), grad * 0.5)[1])
        return loss_of(logits)

    same(run)


def _backward_hook(calls: list, *_) -> None:
    """Has the name of Fabric's hook, and its first argument, which says whether it may raise an error."""
    calls.append(1)


@pytest.mark.parametrize("checks", [False, True])
def test_fabrics_hook_on_outputs(monkeypatch, checks):
    """It reads no gradient. Where it checks who calls backward, and the loss is no output, it is called."""
    monkeypatch.setattr(_backward_hook, "__module__", "lightning.fabric.wrappers")
    calls: list[list] = [[1] if checks else [], [1] if checks else []]
    mine, reference = pair(of_plain_layers)
    for model, seen in zip((mine, reference), calls):
        output = model(**zoo.batch())
        output.logits.register_hook(functools.partial(_backward_hook, seen))
        output.loss.backward()
        logits = logits_of(model)
        logits.register_hook(functools.partial(_backward_hook, seen))
        loss_of(logits).backward()
    assert len(calls[0]) == (2 if checks else 0) and len(calls[1]) >= 2, calls
    for ours, theirs in zip(mine.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_deepspeeds_hook_on_outputs():
    """It waits for the backward pass: beside a loss no logits are made for it; of logits alone, it is called."""
    calls: list[int] = []

    def backward_hook(grad):
        calls.append(1)
        return grad

    backward_hook.__module__ = "deepspeed.runtime.utils"
    mine, reference = pair(of_plain_layers)
    for model in (mine, reference):
        output = model(**zoo.batch())
        for each in (output.loss, output.logits):
            each.register_hook(backward_hook)
        output.loss.backward()
        if model is mine:
            assert calls == [1], "at the loss alone"
        logits = logits_of(model)
        logits.register_hook(backward_hook)
        calls.clear()
        loss_of(logits).backward()
        assert calls == [1]
    for ours, theirs in zip(mine.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_view_and_a_write_pass_a_hook():
    """The view is older than the hook."""

    def run(m, seen):
        logits = logits_of(m)
        part = logits[:, 2:]
        logits.register_hook(lambda grad: (seen.append(grad), grad.clamp(-1e-3, 1e-3))[1])
        logits.div_(0.7)
        return F.cross_entropy(part.flatten(0, 1), zoo.batch()["labels"][:, 2:].flatten())

    same(run)


def test_log_probabilities_have_hooks():
    def run(m, seen):
        each = logits_of(m).log_softmax(-1).gather(-1, zoo.batch()["labels"].clamp(min=0)[..., None]).squeeze(-1)
        each.register_hook(lambda grad: (seen.append(grad), grad * 0.5)[1])
        return each.square().mean()

    same(run)


def test_a_hook_for_several_tensors():
    def run(m, seen):
        logits = logits_of(m)
        logits.argmax(-1)
        torch.autograd.graph.register_multi_grad_hook((logits,), seen.append, mode="any")
        return loss_of(logits)

    same(run)


def test_a_hook_for_several_tensors_waits_for_logits_that_are_made():
    logits = logits_of(pair(of_plain_layers)[0])
    with pytest.raises(NoGradient, match="register_multi_grad_hook"):
        torch.autograd.graph.register_multi_grad_hook((logits,), print)


def test_a_function_took_logits_before_the_hook():
    """Hooks on what a function returned are where its gradient is, as under a model's own backward hook."""

    def run(m, seen):
        logits = Weaker.apply(logits_of(m))
        found = LogSoftmax.apply(logits)
        logits.register_hook(lambda grad: (seen.append(grad), grad * 0.5)[1])
        return found.square().mean()

    same(run)


def test_gradients_that_are_kept_or_asked_for():
    def gradients(m: nn.Module) -> list[Tensor]:
        logits = Weaker.apply(logits_of(m))
        assert logits.grad is None
        logits.retain_grad()
        loss = loss_of(logits)
        asked = torch.autograd.grad(loss, [logits, m.lm_head.weight], retain_graph=True)
        loss.backward()
        return [*asked, logits.grad]

    assert close(*map(gradients, pair(of_plain_layers)))


# -- behind it --------------------------------------------------------------------------------------------------------------


def asked(logits: Tensor, loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logits, allow_unused=True)[0]


def accumulated_untold(logits: Tensor, loss: Tensor) -> Tensor:
    """As `backward(inputs=...)` of versions of torch that ask no subclass."""
    torch.autograd.graph._engine_run_backward(
        (loss,), (torch.ones(()),), False, False, (logits,), allow_unreachable=True, accumulate_grad=True
    )
    return logits.grad


def own_loss(m: nn.Module) -> tuple[Tensor, Tensor]:
    logits = logits_of(m)
    return logits, loss_of(logits)


def models_loss(m: nn.Module) -> tuple[Tensor, Tensor]:
    out = m(**zoo.batch())
    return out.logits, out.loss / 4


def older_cast(m: nn.Module) -> tuple[Tensor, Tensor]:
    logits = logits_of(m)
    cast = logits.double()
    cast.argmax(-1)
    return logits, cast.square().mean()


def log_probabilities_of_rows(m: nn.Module) -> tuple[Tensor, Tensor]:
    logits = logits_of(m)
    rows = [
        row.log_softmax(-1).gather(-1, labels[:, None])
        for row, labels in zip(logits, zoo.batch()["labels"].clamp(min=0))
    ]
    return logits, torch.stack(rows).mean()


@pytest.mark.parametrize("compute, ask", [(own_loss, asked), (models_loss, accumulated_untold)])
def test_a_loss_without_logits_says_so(compute, ask):
    model, reference = pair(of_plain_layers)
    assert ask(*compute(reference)).norm() > 0
    with pytest.raises(NoGradient, match="retain_grad"):
        ask(*compute(model))


@pytest.mark.parametrize("compute", [older_cast, log_probabilities_of_rows])
def test_nothing_passes_a_hook_unnoticed(compute):
    model, reference = pair(of_plain_layers)
    assert asked(*compute(reference)).norm() > 0
    with pytest.raises(NoGradient):
        asked(*compute(model))


def test_the_hook_outlives_the_logits():
    model, _ = pair(of_plain_layers)
    logits, loss = models_loss(model)
    logits.register_hook(print)
    del logits
    with pytest.raises(NoGradient, match="register_hook"):
        loss.backward()


def test_logits_of_one_loss_are_hooked_for_another():
    """That of the model is not differentiated."""

    def run(m, seen):
        out = m(**zoo.batch())
        out.logits.register_hook(seen.append)
        return loss_of(out.logits) + out.loss.detach()

    same(run)


def test_gradients_that_nobody_kept_make_no_logits():
    model, _ = pair(of_plain_layers)
    logits, loss = models_loss(model)
    loss.backward()
    assert logits.grad is None and logits.recipe.real is None
    assert "register_hook" not in " ".join(tunecompile.report(model).notes)


def test_a_leafs_hook_is_refused_as_elsewhere():
    with pytest.raises(RuntimeError, match="non-leaf"):
        logits_of(pair(of_plain_layers)[0]).register_post_accumulate_grad_hook(print)
