"""How tests compare two steps: (loss, gradients by name), within a tolerance or bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.support import zoo

Step = tuple[Tensor, Mapping[str, Tensor]]  #: (loss, gradients by name)
NOISE = 1e-4  #: of the largest gradient: the q and k of a single token get gradients of rounding alone


def assert_close(
    found: Step,
    expected: Step,
    *,
    loss: float = 1e-5,
    limit: float = 1e-4,
    floor: float = 0.0,
    near_zero: float = 1e-12,
    nan_ok: bool = False,
) -> None:
    """Losses within `loss` (relative) or `near_zero` (absolute), gradients within `limit` (relative, in the norm)."""
    assert found[0].item() == pytest.approx(expected[0].item(), rel=loss, abs=near_zero, nan_ok=nan_ok)
    errors = zoo.errors(found[1], expected[1], floor)
    assert errors, "no parameter has a gradient"
    assert {name: error for name, error in errors.items() if not error < limit} == {}


def equal_bits(found: tuple, expected: tuple) -> bool:
    """Whether two steps are the same bit for bit; gradients in a list or by name."""
    (loss, gradients), (exact_loss, exact) = found, expected
    return (
        torch.equal(loss, exact_loss)
        and _keys(gradients) == _keys(exact)
        and all(torch.equal(gradients[key], exact[key]) for key in _keys(exact))
    )


def _keys(gradients: Mapping[str, Tensor] | Sequence[Tensor]) -> set:
    return set(gradients) if isinstance(gradients, Mapping) else set(range(len(gradients)))


def assert_equal(found: Step, expected: Step) -> None:
    """Two steps are the same bit for bit."""
    assert torch.equal(found[0], expected[0]), (found[0].item(), expected[0].item())
    assert _keys(found[1]) == _keys(expected[1])
    assert [name for name in expected[1] if not torch.equal(found[1][name], expected[1][name])] == []


def assert_same_run(
    model: nn.Module, reference: nn.Module, run: Callable[[nn.Module], Tensor], limit: float = 1e-4
) -> None:
    """The loss `run(model)` is the same on both, and so are its gradients, which stay in `.grad`."""
    steps = []
    for m in (model, reference):
        m.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        loss = run(m)
        loss.backward()
        steps.append((loss.detach(), {name: p.grad for name, p in m.named_parameters() if p.grad is not None}))
    # GRPO's loss is a difference of terms near one
    assert_close(*steps, limit=limit, floor=NOISE, near_zero=1e-7, nan_ok=True)


def assert_same_step(
    model: nn.Module, reference: nn.Module, inputs: dict | None = None, limit: float = 1e-4, loss: float = 1e-5
) -> None:
    """One training step on `inputs` (by default `zoo.batch()`) is the same on both."""
    steps = [zoo.step(m, dict(inputs or zoo.batch())) for m in (model, reference)]
    assert_close(*steps, loss=loss, limit=limit)


def assert_same_flattened(model: nn.Module, reference: nn.Module, inputs: dict, limit: float = 1e-5) -> None:
    """As `assert_same_step`; without padding, the same products are summed, so it is closer."""
    assert_same_step(model, reference, inputs, limit, loss=1e-6)
