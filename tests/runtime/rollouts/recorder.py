"""A recorder without a GPU: what it recorded is run again, and writes where the recording would."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from tunecompile.runtime.model_state import state_of
from tunecompile.runtime.parts import Rollouts
from tunecompile.runtime.rollouts.loop import Loop


def of_host(value: object) -> bool:
    """Whether it is a number, or a dictionary of numbers."""
    return isinstance(value, int) or (isinstance(value, dict) and all(isinstance(v, int) for v in value.values()))


class Replayed:
    """Nothing runs while it is recorded; each replay runs the function, and fills the outputs of the recording.

    Numbers of the host that the cache holds are in a replay what they were when it was recorded.
    """

    device = "cpu"

    def __init__(self) -> None:
        self.replays = self.records = 0

    def record(self, run: Callable[[], Sequence[Tensor]], pool, device) -> tuple[Sequence[Tensor], Callable]:
        self.records += 1
        layers = next(value for value in run.kwargs.values() if isinstance(value, Cache)).layers
        numbers = [{name: value for name, value in vars(layer).items() if of_host(value)} for layer in layers]
        numbers = copy.deepcopy(numbers)
        outputs = [torch.empty(0), torch.empty(0)]

        def play() -> None:
            self.replays += 1
            for layer, then in zip(layers, numbers, strict=True):
                vars(layer).update(copy.deepcopy(then))
            for output, value in zip(outputs, run(), strict=True):
                output.resize_(value.shape).copy_(value)

        return outputs, play


def loop_of(model: nn.Module) -> Loop:
    """The loop of an optimized model, recorded on the CPU."""
    loop = state_of(model).part(Rollouts).loop
    loop.recorder = Replayed()
    return loop
