"""While a model makes its masks, before its first layer runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tunecompile._torch.fake_tensors import function_mode
from tunecompile._torch.modules import slot_of
from tunecompile.runtime.unpad.masks.pairs import BEGINNINGS, begun

LONG = 1 << 25  #: pairs of a batch from which on masks are recorded: one row of 8,192 tokens has twice as many


class MaskRecorder(TorchFunctionMode):
    """While a model makes its masks: comparisons and distances of at least so many pairs are recorded.

    A model may leave a mask out where no row has padding, which it asks the device. Where layers have a graph for masks
    alone, the answer is no: the model makes one, and nothing is waited for.

    Args:
        pairs: from which on masks are recorded.
        padding: a mask [B, T] of which the model is not to know whether it is all ones.

    It ends at the first layer: Dynamo would trace it, and guard on it. Until then, numbers reach a GPU without a wait.
    """

    def __init__(self, pairs: float, padding: Tensor | None = None):
        super().__init__()
        self.pairs = pairs
        self.padding = None if padding is None else _Padding(padding)
        self.begun = self.ended = False
        self.records = 0

    def begin(self) -> None:
        """From now on."""
        self.begun = True
        self.__enter__()

    def end(self) -> None:
        """No longer. If another mode that began later has not ended, this one stays, and does nothing."""
        self.ended = True
        if self.begun and function_mode() is self:
            self.begun = False
            self.__exit__(None, None, None)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in BEGINNINGS and not (self.ended or kwargs):
            made = begun(func, args, self.pairs)
            if made is not None:
                self.records += 1
                return made
        if func is torch.tensor and not self.ended and _is_number_for_gpu(args, kwargs or {}):
            func, args = torch.full, ((), *args)
        if self.padding is None or self.ended or kwargs or not self.padding.is_asked(func, args):
            result = func(*args, **(kwargs or {}))
            if self.padding is not None and not self.ended:
                self.padding.follow(args, result)
            return result
        return torch.zeros((), dtype=torch.bool, device="cpu")  # nothing is waited for


class _Padding:
    """A mask [B, T], what a model made of it token by token, and how many ones it counted."""

    def __init__(self, mask: Tensor):
        self.masks, self.counts = [mask], []

    def is_asked(self, func: Any, args: tuple) -> bool:
        """Whether this asks if the mask is all ones: by `all`, or by a sum of as many ones as it has elements."""
        if func in _ALL:
            return len(args) == 1 and _among(args[0], self.masks)
        if func not in _EQUAL or len(args) != 2 or not isinstance(args[1], int):
            return False
        return args[1] == self.masks[0].numel() and _among(args[0], self.counts)

    def follow(self, args: tuple, result: Any) -> None:
        """Something was computed."""
        if not (args and isinstance(result, Tensor) and _among(args[0], self.masks)):
            return
        if result.shape == self.masks[0].shape:
            self.masks.append(result)
        elif not result.dim():
            self.counts.append(result)


_ALL, _EQUAL = (torch.all, Tensor.all), (torch.eq, Tensor.eq, Tensor.__eq__)


def _among(value: Any, tensors: list[Tensor]) -> bool:
    return any(value is each for each in tensors)


def _is_number_for_gpu(args: tuple, kwargs: dict) -> bool:
    """Whether `torch.tensor` is to copy one number to a GPU: it waits until all that was launched before is done.

    (transformers 5.17 does so in each step, for masks of attention that is written out.)
    """
    on = kwargs.get("device")
    plain = len(args) == 1 and type(args[0]) in (bool, int, float) and kwargs.keys() <= {"device", "dtype"}
    if not plain or on is None or torch.device(on).type != "cuda":
        return False
    return abs(args[0]) <= torch.finfo(torch.float32).max  # `full` refuses what `tensor` rounds to infinity


@contextlib.contextmanager
def not_recording() -> Iterator[None]:
    """Inside, no masks are recorded: Dynamo would trace what does."""
    recorder = function_mode() if function_mode is not None else None
    if not isinstance(recorder, MaskRecorder):
        yield
        return
    recorder.__exit__(None, None, None)
    try:
        yield
    finally:
        recorder.__enter__()


def recorder_for(given: Iterable[Any], written_out: bool = False, padding: Tensor | None = None) -> MaskRecorder | None:
    """For a model that is given these; None where nothing is recorded, or torch does not tell of modes.

    Args:
        given: arguments of the model.
        written_out: whether its attention is, so that small masks are made, too, with numbers on the device.
        padding: see `MaskRecorder`.
    """
    tokens = next((x for x in given if isinstance(x, Tensor) and x.dim() in (2, 3)), None)
    if tokens is None or function_mode is None:
        return None
    rows, length = tokens.shape[:2]
    if rows * length**2 < LONG:
        small = padding is not None or (written_out and tokens.is_cuda)
        return MaskRecorder(math.inf, padding) if small else None
    return MaskRecorder(length**2, padding)


def compiled_parts(owner: nn.Module) -> bool:
    """Whether the user compiled any module beside the layers: its graph would be traced anew to record masks."""
    for part in owner.children():
        slot = slot_of(part)
        ours = slot is None or type(slot).__module__.startswith("tunecompile.")
        if not ours or type(part).__module__.startswith("torch._dynamo"):
            return True
    return False
