"""A cell of the support matrix, followed: losses, gradients and trained weights as without `optimize`."""

from __future__ import annotations

from statistics import median

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.compare import NOISE
from tests.support.matrix.cells import DEVICE, Cell

LIMIT = 2e-4 if DEVICE == "cpu" else 1e-3


def built(cell: Cell) -> torch.nn.Module:
    with torch.device(
        DEVICE if cell.section in ("base", "saving") else "cpu"
    ):  # weights of 8 bits stay where they became so. Some of PEFT's adapters draw with a generator of the CPU
        model = cell.build()
    return model if hasattr(model, "hf_device_map") else model.to(DEVICE)  # accelerate has placed it


def optimized(cell: Cell) -> torch.nn.Module:
    return tunecompile.optimize(built(cell), executor="eager" if DEVICE == "cpu" else "inductor")


def follow_draws(cell: Cell) -> torch.nn.Module:
    """Each step draws masks of its own: gradients are compared in the mean of many. Taken together they differ by a thousandth then, and by a tenth if what is kept were not scaled."""
    plain, model = built(cell), optimized(cell)
    batch = {name: value.to(DEVICE) for name, value in cell.batches()[0].items()}
    ours, theirs = (mean_gradients(m, batch, cell.loss) for m in (model, plain))
    assert set(ours) == set(theirs) and max(zoo.errors(ours, theirs, NOISE).values()) < 0.2
    along = [torch.cat([(each[name] / theirs[name].norm()).flatten() for name in theirs]) for each in (ours, theirs)]
    assert (along[0] @ along[1] / along[1].square().sum()).item() == pytest.approx(1, abs=0.02)
    return model


def mean_gradients(model: torch.nn.Module, batch: dict, loss, steps: int = 100) -> dict[str, torch.Tensor]:
    total: dict[str, torch.Tensor] = {}
    for _ in range(steps):
        for name, gradient in zoo.step(model, dict(batch), loss=loss)[1].items():
            total[name] = total.get(name, 0) + gradient.double() / steps
    return total


def follow_steps(cell: Cell) -> torch.nn.Module:
    """In half precision, what counts is the distance to the same weights in fp32, beside eager's."""
    plain, model = built(cell), optimized(cell)
    half = any(p.is_floating_point() and p.dtype in (torch.bfloat16, torch.float16) for p in plain.parameters())
    exact = zoo.in_fp32(plain) if half else plain
    for batch in cell.batches():
        batch = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        steps = [zoo.step(m, dict(batch), loss=cell.loss) for m in ((model, plain, exact) if half else (model, plain))]
        (loss, gradients), (plain_loss, plain_gradients), (_, truth) = steps[0], steps[1], steps[-1]
        assert set(gradients) == set(plain_gradients)
        assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-2 if half else 1e-5, abs=1e-6)
        off, own = (zoo.errors(found, truth, NOISE) for found in (gradients, plain_gradients))
        if half:
            assert median(off.values()) < 1.1 * median(own.values()) + 1e-4
        for name, error in off.items():
            assert error < (3 * own[name] + 5e-3 if half else cell.limit or LIMIT), (
                f"{name}: {error:.1e}, eager's {own[name]:.1e}"
            )
    return model


def learnt(model: torch.nn.Module, start: dict) -> dict:
    """Lightning leaves the model on the CPU."""
    return {
        name: p.detach().double().to(start[name].device) - start[name]
        for name, p in model.named_parameters()
        if name in start
    }


def follow_run(cell: Cell, folder) -> torch.nn.Module:
    """All that is logged, and by how much each weight has changed: with SGD, the sum of its gradients."""
    start = {name: p.detach().double() for name, p in built(cell).named_parameters() if p.requires_grad}
    made, outcomes = [], []
    for make in (optimized, built):
        torch.manual_seed(7)
        outcomes.append(cell.run(lambda: made.append(make(cell)) or made[-1], folder / make.__name__))
    (numbers, trained), (plain_numbers, plain) = outcomes
    limit = cell.limit or LIMIT
    changes, truth = learnt(trained, start), learnt(plain, start)
    assert sum(change.any().item() for change in truth.values()) > len(truth) // 2, (
        "it learns nothing, so it proves nothing"
    )
    if cell.random:
        assert all(change.isfinite().all() for change in changes.values())
        return made[0]
    assert numbers == pytest.approx(plain_numbers, rel=limit, abs=limit / 10)
    for name, error in zoo.errors(changes, truth, NOISE).items():
        assert error < limit, f"{name}: {error:.1e}"
    return made[0]
