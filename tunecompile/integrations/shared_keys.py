"""Layers whose keys and values later layers read, and those that could keep theirs as well (Gemma 4's small models).

A layer that keeps them is compiled as a kind of its own, with two more results: E4B has two such layers of 42, a third
of its kinds. So all layers that could keep theirs do, and nobody reads those that were not kept before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

MAPPING = "shared_kv_states"  #: the argument of layers in which keys are kept, by their kind of layer
_KEEPS, _READS = "store_full_length_kv", "is_kv_shared_layer"  #: attributes of transformers' attention
_NUMBER = "kv_shared_layer_index"  #: of Gemma 3n's before transformers 5.20: keys are kept by their layer's number


class KeptKeys:
    """Attention modules that keep their keys for as long as layers are compiled.

    Args:
        layers: of one owner, in order.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        found = {layer: module for layer in layers for module in _attention(layer)}
        own = {layer: module for layer, module in found.items() if not getattr(module, _READS)}
        last = {module.layer_type: module for module in own.values()}
        suits = len(own) < len(found) and all(getattr(module, _KEEPS) for module in last.values())
        #: by layer that keeps keys: whether they are read. Empty where no layer reads those of another
        self.read = {layer: module is last[module.layer_type] for layer, module in own.items()} if suits else {}
        self._changed = [own[layer] for layer in self.read if not getattr(own[layer], _KEEPS)]
        for module in self._changed:
            setattr(module, _KEEPS, True)

    def restore(self) -> None:
        """Only those keep keys that did."""
        for module in self._changed:
            setattr(module, _KEEPS, False)


def _attention(layer: nn.Module) -> Iterator[nn.Module]:
    """The module that keeps or reads keys, by its kind of layer: those that are read are the last ones."""
    for module in layer.modules():
        held = vars(module).keys()
        if {_KEEPS, _READS, "layer_type"} <= held and _NUMBER not in held:
            yield module
