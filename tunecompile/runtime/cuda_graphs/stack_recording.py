"""Recordings of a chain of layers: one forward and one backward, for one shape, in fixed memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tunecompile._torch.autograd import plain_tensors
from tunecompile.runtime.cuda_graphs.capture import Recorder
from tunecompile.runtime.cuda_graphs.chain import Chain, shape_of
from tunecompile.runtime.cuda_graphs.recording import are_unheld, copy_all, device_of


class StackRecording:
    """A chain's forward and backward for one shape.

    What the forward saves lies in the pool of its flight, where others may write: it is replayed only while no backward
    of the pool is still to come (`free`). The backward frees nothing, so that it may be replayed twice.

    Args:
        chain: whose passes are recorded.
        inputs: of its first call, and what later calls bring.
        buffer: returns a buffer for an input, by its position, and for the gradient of the result, at -1.
        pool: whose memory it shares.
    """

    def __init__(self, chain: Chain, inputs: Sequence[Any], buffer: Callable[[int, Tensor], Tensor], pool: int):
        varying = [i for i in sorted(chain.read()) if isinstance(inputs[i], Tensor) and chain.varies(i)]
        self.brought = shape_of(inputs[len(chain.calls[0].sources) :])  #: shapes of what later calls bring
        self.buffer, self.pool = buffer, pool
        self.copied = [(i, buffer(i, inputs[i])) for i in varying]
        self.differentiable = [i for i in varying if inputs[i].requires_grad]
        fixed = {id(tensor): tensor for call in chain.calls for tensor in call.fixed()}
        self.trained = [tensor for tensor in fixed.values() if tensor.requires_grad]
        with plain_tensors():
            self.fixed = [(tensor, _state(tensor)) for tensor in fixed.values()]
        self.lent: list[Tensor] = []  #: a token that autograd holds as long as a backward is to come
        self.output = self.gradient = torch.empty(0, device="cpu")
        self.gradients: list[Tensor | None] = []
        self._play: Callable[[], None] = _not_recorded
        self._play_back: Callable[[], None] = _not_recorded

    def record(
        self,
        chain: Chain,
        inputs: Sequence[Any],
        recorder: Recorder,
        alone: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        """Record both passes.

        Args:
            chain: whose passes are recorded.
            inputs: of its first call.
            recorder: of the device.
            alone: a context in which layers are not recorded by themselves.

        Raises:
            Exception: any, where a call cannot be recorded.
        """
        self.load(inputs)
        given, device = self._stand_ins(inputs), device_of(inputs)
        aliases = {id(tensor): tensor.detach().requires_grad_() for tensor in self.trained}
        leaves = (*(given[i] for i in self.differentiable), *aliases.values())
        under_way = _UnderWay()

        def forward() -> list[Tensor]:
            with torch.enable_grad(), alone():
                under_way.result = chain.run(given, len(chain.calls), lambda tensor: aliases.get(id(tensor), tensor))
            return [under_way.result.detach()]

        def backward() -> list[Tensor]:
            of = (under_way.result,), leaves, (self.gradient,)
            found = torch.autograd.grad(*of, retain_graph=True, allow_unused=True)
            under_way.used = tuple(gradient is not None for gradient in found)
            return [gradient for gradient in found if gradient is not None]

        (output,), self._play = recorder.record(forward, self.pool, device)
        self.gradient = self.buffer(-1, output)
        found, self._play_back = recorder.record(backward, self.pool, device)
        self.output = recorder.give_back(output, self._play)
        gradients = iter([recorder.give_back(gradient, self._play_back) for gradient in found])
        self.gradients = [next(gradients) if is_used else None for is_used in under_way.used]

    def load(self, inputs: Sequence[Any]) -> None:
        """Copy inputs to where they are read; what later calls bring may be missing."""
        there = [(buffer, inputs[position]) for position, buffer in self.copied if position < len(inputs)]
        with torch.no_grad():
            copy_all([buffer for buffer, _ in there], [value for _, value in there])

    def load_at(self, position: int, value: Tensor) -> Tensor | None:
        """Copy one input to where it is read, and return that; None where it is of another kind than was recorded."""
        buffer = next((each for at, each in self.copied if at == position), None)
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            return None
        with torch.no_grad():
            return buffer.copy_(value)

    def _stand_ins(self, inputs: Sequence[Any]) -> tuple:
        """The inputs, as they are recorded: buffers in the place of those that vary."""
        given = list(inputs)
        for position, buffer in self.copied:
            given[position] = buffer.detach().requires_grad_(position in self.differentiable)
        return tuple(given)

    def fits(self) -> bool:
        """Whether no weight moved, and no frozen one was written to: a matrix may have its values."""
        with plain_tensors():
            return all(_state(tensor) == state for tensor, state in self.fixed)

    def free(self) -> bool:
        """Whether no backward that needs what the last replay saved is still to come."""
        return are_unheld(self.lent)

    def replay(self, inputs: Sequence[Any], settle: Callable[[], None]) -> Tensor:
        """The chain's result, from the inputs of its first call. `settle` is called before its backward."""
        self.lent = [torch.empty(0, device="cpu")]
        needing = [inputs[i] for i in self.differentiable] + self.trained
        return _Replay.apply(self, settle, inputs, self.lent[0], *needing)

    def play(self, inputs: Sequence[Any]) -> Tensor:
        """Run the forward."""
        self.load(inputs)
        self._play()
        return self.output.clone()

    def play_back(self, gradient: Tensor) -> list[Tensor | None]:
        """Run the backward: gradients of the inputs that need them."""
        self.gradient.copy_(gradient)
        self._play_back()
        copies = [None if each is None else torch.empty_like(each) for each in self.gradients]
        copy_all([each for each in copies if each is not None], [each for each in self.gradients if each is not None])
        return copies


def _state(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.requires_grad else tensor._version


@dataclass
class _UnderWay:
    """What a recording needs until it is made. (Parameters have hooks, so that detached tensors stand in for them.)"""

    result: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    used: tuple[bool, ...] = ()


class _Replay(torch.autograd.Function):
    """A recorded stack of layers."""

    @staticmethod
    def forward(
        ctx: Any,
        made: StackRecording,
        settle: Callable[[], None],
        inputs: Sequence[Any],
        token: Tensor,
        *needing: Tensor,
    ) -> Tensor:
        ctx.made, ctx.settle = made, settle
        ctx.save_for_backward(token)
        return made.play(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # an error where it ran before, and the graph was not retained
        ctx.settle()
        return None, None, None, None, *ctx.made.play_back(gradient)


def _not_recorded() -> None:
    raise AssertionError("not recorded")
