"""Which op makes the first value that is not finite: one more forward pass, eagerly, that looks at every result."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from tunecompile._torch.distributed import several
from tunecompile._torch.fake_tensors import TorchDispatchMode
from tunecompile.notes import Note, note
from tunecompile.runtime.unpad.refusals import gathers

TORCH = str(Path(inspect.getfile(torch)).parent) + os.sep
SENDS = ("c10d", "_c10d_functional", "_c10d_functional_autograd")  #: namespaces of collectives
UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def origin(model: nn.Module, args: tuple, kwargs: Mapping[str, Any], step: int) -> Note | None:
    """Repeat a forward pass without gradients and dropout, and return a note on where its values cease to be finite.

    The pass is an evaluation's, which is never compiled; random numbers are drawn from a copy of their state. Of
    several ranks each repeats its own, as long as no other has to take part: nothing is repeated where weights are in
    parts, and the pass ends before anything is sent.

    Args:
        model: that gave a loss that is not finite.
        args: of the call.
        kwargs: of the call.
        step: number of the step.

    Returns:
        The note; None where all values are finite, where other ranks would be needed, or the pass fails, as it does if
        memory is short.
    """
    if isinstance(model, DistributedDataParallel):  # it sends buffers before each pass
        model = model.module
    if several() and _in_parts(model):
        return None
    look = _Look(model, step)
    with contextlib.suppress(Exception), _as_evaluation(model), look:
        model(*args, **kwargs)
    return look.found or look.likely


def _in_parts(model: nn.Module) -> bool:
    """Whether a rank holds parts of weights, which are gathered, or whose outputs are summed, while the model runs."""
    return gathers(model) or any(hasattr(parameter, "to_local") for parameter in model.parameters())


@contextlib.contextmanager
def _as_evaluation(model: nn.Module) -> Iterator[None]:
    trained = [module for module in model.modules() if module.training]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(list(devices)), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module in trained:
                module.training = True


class _OthersNeeded(Exception):
    """The pass would send something to other ranks, which do not expect it."""


class _Look(TorchDispatchMode):
    """Looks for the first result that is not finite, or the first weight."""

    def __init__(self, model: nn.Module, step: int):
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.weights = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self.inside: list[str] = []
        self.step = step
        self.found: Note | None = None
        self.likely: Note | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> _Look:
        every = nn.modules.module
        self._hooks = [
            every.register_module_forward_pre_hook(self._enter),
            every.register_module_forward_hook(self._leave),
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.inside.append(self.names.get(id(module), self.inside[-1] if self.inside else ""))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace in SENDS:
            raise _OthersNeeded
        broken = [] if self.found else [each for each in tree_leaves((args, kwargs)) if not _is_finite(each)]
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self.found is None and name not in UNWRITTEN:
            results = [each for each in tree_leaves(result) if not _is_finite(each)]
            weights = [self.weights[id(each)] for each in broken if id(each) in self.weights and not _is_mask(each)]
            if results and weights:
                self.found = note("weight-not-finite", weights[0], step=self.step)
            elif results and not broken:
                where = next((each for each in reversed(self.inside) if each), "the model")
                made = note("made-not-finite", where, _line(), step=self.step, op=name)
                if all(map(_is_mask, results)):  # log(0) may be meant: kept in case nothing else is found
                    self.likely = self.likely or made
                else:
                    self.found = made
        return result


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
        return True
    return bool(torch.isfinite(value).all())


def _is_mask(tensor: Tensor) -> bool:
    """Whether all that is not finite is minus infinity, as in masks."""
    return bool((torch.isfinite(tensor) | (tensor == -math.inf)).all())


def _line() -> str:
    """The file and line of the model that is being run."""
    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if not file.startswith(TORCH) and file != __file__:
            return f"{Path(file).name}:{line}"
    return ""
