"""A recorder without a GPU: what it recorded is run again, and writes where the recording would."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tunecompile.runtime.model_state import state_of
from tunecompile.runtime.parts import Rollouts
from tunecompile.runtime.rollouts.loop import Loop


class Replayed:
    """Nothing runs while it is recorded; each replay runs the function, and fills the outputs of the recording."""

    device = "cpu"

    def __init__(self) -> None:
        self.replays = self.records = 0

    def record(self, run: Callable[[], Sequence[Tensor]], pool, device) -> tuple[Sequence[Tensor], Callable]:
        self.records += 1
        outputs = [torch.empty(0), torch.empty(0)]

        def play() -> None:
            self.replays += 1
            for output, value in zip(outputs, run(), strict=True):
                output.resize_(value.shape).copy_(value)

        return outputs, play


def loop_of(model: nn.Module) -> Loop:
    """The loop of an optimized model, recorded on the CPU."""
    loop = state_of(model).part(Rollouts).loop
    loop.recorder = Replayed()
    return loop
