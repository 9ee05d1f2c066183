"""A model while it is verified, and as it was, afterwards: gradients, buffers, random state, zeros and dropout."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch
from torch import nn

from tunecompile.notes import Note, note
from tunecompile.runtime.model_state import ATTRIBUTE, State

SMALL = 0.01  #: standard deviation of the numbers in place of zeros


@contextlib.contextmanager
def unchanged(model: nn.Module, seed: int) -> Iterator[list[Note]]:
    """Prepare a model for being verified, and restore it afterwards.

    Args:
        model: to verify.
        seed: of the random values in place of zeros.

    Yields:
        Notes on what was changed meanwhile.
    """
    notes: list[Note] = []
    gradients = {p: p.grad for p in model.parameters() if p.grad is not None}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with contextlib.ExitStack() as stack:
        stack.callback(_forget, model)
        device = next(model.parameters()).device
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        for put_back in (_fill_zeros(model, seed, notes), _without_dropout(model, notes)):
            stack.callback(put_back)
        try:
            yield notes
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers and not torch.equal(buffer, buffers[name]):
                        buffer.copy_(buffers[name])
            for parameter in model.parameters():
                parameter.grad = gradients.get(parameter)


def _forget(model: nn.Module) -> None:
    """Free the twins, which are in reference cycles, and drop what memory budgets measured of their steps."""
    gc.collect()
    state: State | None = getattr(model, ATTRIBUTE, None)
    for budget in state.step.budgets if state is not None else ():
        budget.progress.forget(budget.memory.gauge)


@torch.no_grad()
def _fill_zeros(model: nn.Module, seed: int, notes: list[Note]) -> Callable[[], None]:
    """Give trained matrices that are zero, such as a fresh LoRA's B, small random values. Returns the undo."""
    zero = [p for p in model.parameters() if p.requires_grad and p.dim() > 1 and not p.any()]
    for number, parameter in enumerate(zero):
        generator = torch.Generator().manual_seed(seed + number)
        parameter.copy_(torch.empty(parameter.shape, device="cpu").normal_(0, SMALL, generator=generator))
    if zero:
        notes.append(note("zeros-replaced", count=len(zero)))

    @torch.no_grad()
    def put_back() -> None:
        for parameter in zero:
            parameter.zero_()

    return put_back


def _without_dropout(model: nn.Module, notes: list[Note]) -> Callable[[], None]:
    """Set dropout to zero, since masks differ by design: in modules, and where attention reads it. Returns the undo."""
    found = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
        and value > 0
        and ("dropout" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd)))
    ]
    for module, name, _ in found:
        setattr(module, name, 0.0)
    if found:
        notes.append(note("dropout-off", count=len(found)))

    def put_back() -> None:
        for module, name, value in found:
            setattr(module, name, value)

    return put_back
