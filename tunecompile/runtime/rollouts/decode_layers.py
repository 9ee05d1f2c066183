"""Layers of a recorded step, by compiled code: one graph for each kind of layer, whatever its number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tunecompile._torch.dynamo import is_compiling, mark_dynamic, static_shapes
from tunecompile._torch.modules import call_original
from tunecompile.integrations.generation import IndexRead, LayerParts
from tunecompile.integrations.transformers import is_cache
from tunecompile.notes import note
from tunecompile.runtime.layers.dynamic_shapes import tensors_in
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.layers.region import CallKind

ROLLOUT = "rollout"  #: in place of a plan


class DecodeLayers:
    """Runs the layers of one step.

    The number of rows is a constant of the code, as products of few rows have it; the length of the cache is a symbol.

    Args:
        cache: in fixed memory, which the prompt has filled.
        length: of it, in tokens.
    """

    def __init__(self, cache: Any, length: int):
        self.parts, self.length = LayerParts(cache), length
        self.eager: set[int] = set()  #: ids of regions whose layers run by their own code
        for number in range(len(self.parts.parts)):
            for tensor in self.parts.tensors(number):
                # Dynamo would guard on the very tensor, and so compile each layer anew
                vars(tensor).pop("_dynamo_static_input_type", None)
            for tensor in self.parts.tokens(number):
                mark_dynamic(tensor, [2])

    def _is_mask(self, tensor: Tensor) -> bool:
        """Whether it is [rows, 1, 1, length]. (Other sizes, of heads, say, may be the same number.)"""
        return tensor.dim() == 4 and tensor.shape[2] == 1 and tensor.shape[3] == self.length

    def call(self, slot: LayerSlot, args: tuple, kwargs: dict) -> Any:
        """The output of a layer."""
        number, layer, given = self.parts.of(slot.layer), slot.layer, (args, kwargs)
        if number is None or id(slot.region) in self.eager or is_compiling() or not slot.stays:
            return call_original(layer, *args, **kwargs)
        part = self.parts.parts[number]
        args = tuple(part if is_cache(value) else value for value in args)
        kwargs = {name: part if is_cache(value) else value for name, value in kwargs.items()}
        tensors = list(tensors_in(args, kwargs))
        for _, tensor in tensors:
            if self._is_mask(tensor):
                mark_dynamic(tensor, [3])
        region = slot.region
        setting = (torch.is_grad_enabled(), region.classes.version, slot.switched_off.active)
        shapes = ((where, t.dtype, t.shape[:3] if self._is_mask(t) else t.shape) for where, t in tensors)
        variant = region.scoring(CallKind(setting, tuple(shapes)), way=ROLLOUT)
        before = [] if variant.ran else [(each, each.clone()) for each in self.parts.tensors(number)]
        try:
            # Rows that differ from call to call would be a symbol, for which there are no products of few rows
            with self.parts.alone(layer, number), static_shapes():
                return variant.call(layer, *args, **kwargs)
        except IndexRead:
            for tensor, value in before:
                tensor.copy_(value)
            region.refused[note("layer-number-read")] += 1
            self.eager.add(id(region))
            return call_original(layer, *given[0], **given[1])
