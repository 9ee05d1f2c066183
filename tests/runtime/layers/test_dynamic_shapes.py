"""Which dimensions of a layer's arguments count as following the batch, as its shapes tell."""

import pytest
import torch

from tunecompile.runtime.layers import dynamic_shapes
from tunecompile.runtime.layers.dynamic_shapes import DynamicShapes, batch_tokens


def test_tokens_of_a_call():
    """By its first tensor of several dimensions, whether it is given by position or by name."""
    hidden, table = torch.zeros(2, 5, 8), torch.zeros(1, 5, 4)
    assert batch_tokens((hidden,), {}) == batch_tokens((), {"hidden": hidden, "tables": (table, table)}) == 10
    assert batch_tokens((torch.zeros(3, 7, 8),), {"x": None}) == 21


@pytest.fixture
def marked(monkeypatch):
    """A function: the dimensions of each argument that are symbols in a call, whose hidden states come first."""
    seen: dict[int, list[int]] = {}
    monkeypatch.setattr(dynamic_shapes, "mark_dynamic", lambda tensor, dims: seen.update({id(tensor): list(dims)}))

    def run(sizes: DynamicShapes, *shapes, layer: int = 0) -> list[list[int]]:
        seen.clear()
        tensors = [(place, torch.zeros(shape)) for place, shape in enumerate(shapes)]
        sizes.mark(tensors, DynamicShapes.of(tensors), layer)
        return [seen.get(id(tensor), []) for _, tensor in tensors]

    return run


def test_layers_with_other_widths_are_no_change(marked):
    """Heads of Gemma 4 are wider in every sixth layer, and the tables of RoPE that these are given."""
    sizes = DynamicShapes()
    for batch in range(2):
        for layer, width in enumerate((16, 32, 16)):
            assert marked(sizes, (2, 24, 64), (1, 24, width), layer=layer) == [[], []], batch
    assert marked(sizes, (2, 20, 64), (1, 20, 16), layer=0) == [[0, 1], [1]]
