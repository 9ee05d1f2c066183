"""The slot of a norm outside the layers: the last one, between layers and head, or one of embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tunecompile._torch.autograd import in_backward
from tunecompile._torch.dynamo import is_compiling
from tunecompile._torch.modules import HOOKS, call_original, global_hooks
from tunecompile.runtime.layers.dynamic_shapes import tensors_in
from tunecompile.runtime.layers.force_grad import without_graph
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.layers.region import CallKind
from tunecompile.runtime.step.mode import Mode
from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.masks.recorder import not_recording
from tunecompile.runtime.unpad.unpad import Unpadding

#: bytes of hidden states in fp32, from which on a norm outside the layers is compiled: eager code holds several copies
#: of them
LARGE = 256 << 20


class NormSlot(LayerSlot):
    """Runs a norm: compiled for long batches, one graph for all lengths, without a plan. Of a batch that came to the
    layers without its padding, real tokens alone are normalised.
    """

    budget = None
    #: of the layers before it, in training steps and in evaluations
    before: tuple[Unpadding, Unpadding] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._row(args, kwargs)
        if found is None:
            return self._norm(args, kwargs)
        flat, row = found
        return flat.unflatten(self._norm((row,), kwargs))

    def _row(self, args: tuple, kwargs: dict) -> tuple[FlatBatch, Tensor] | None:
        """The last layer's result before it was padded; None where somebody may look at the norm's arguments."""
        if self.before is None or is_compiling() or len(args) != 1 or kwargs:
            return None
        seen = any(getattr(self.layer, name) for name in HOOKS) or any(global_hooks())
        return None if seen or in_backward() else self.before[self.step.evaluates].row_of(args[0])

    def _norm(self, args: tuple, kwargs: dict) -> Any:
        trains = self.step.active and torch.is_grad_enabled()
        scores = self.step.scoring and not torch.is_grad_enabled() and bool(args)
        runs = not is_compiling() and (trains or scores)
        hidden = next((tensor for _, tensor in tensors_in(args, kwargs)), None) if runs else None
        if hidden is None or 4 * hidden.numel() < LARGE or self._refused():
            return call_original(self.layer, *args, **kwargs)
        with not_recording():  # a norm of embeddings comes before masks
            if trains:
                return self._gathered(self.compiled, args, kwargs)
            if self.step.evaluates:
                return self._run_as(Mode.SCORE, args, kwargs)
            with torch.enable_grad():  # by the code that trains, whose hidden states come from layers
                args = (args[0].detach().requires_grad_(), *args[1:])
                return without_graph(self._gathered(self.compiled, args, kwargs))

    def _kind(self, args: tuple, kwargs: dict, scores: bool = True) -> tuple[CallKind, tuple[int, ...]]:
        return super()._kind(args, kwargs, scores)
