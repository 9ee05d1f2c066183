"""How often layers are compiled, whatever batches come: as few graphs as there are kinds of calls, and a second for changing sizes."""

import copy

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_same_step
from tests.support.models.pairs import attending, pair
from tests.support.notes import fell_back
from tunecompile.compiler.backend import CompiledAs, WeakBackend
from tunecompile.planner.solver import KEEP, RECOMPUTE
from tunecompile.runtime.layers import dynamic_shapes
from tunecompile.runtime.layers.dynamic_shapes import DynamicShapes

pytestmark = pytest.mark.filterwarnings("ignore")

SHAPES = ((4, 20), (3, 33), (2, 47), (5, 15), (4, 20), (2, 90))


def compiles(model) -> list[int]:
    return [region.compiles for region in tunecompile.report(model).regions]


def test_batches_of_many_shapes():
    model, reference = pair(attending)
    for seed, (rows, length) in enumerate(SHAPES):
        assert_same_step(model, reference, zoo.batch(256, rows, length, seed=seed))
    assert compiles(model) == [2]


def test_adapters_that_are_switched_to_themselves():
    """PEFT's modules share one list of active adapters, or have one each: that depends on the last switch."""
    pytest.importorskip("peft")
    model, reference = pair(
        lambda: zoo.adapt(zoo.make("llama", num_hidden_layers=1), target_modules=["q_proj", "v_proj"])
    )
    for each in (model, reference):
        each.base_model.set_adapter(["default"])
    for name in ("default", ["default"]):
        assert_same_step(model, reference)
        for each in (model, reference):
            each.base_model.set_adapter(name)
    assert_same_step(model, reference)
    assert compiles(model) == [1]


def learnt(*calls: dict, at_once: bool = False) -> dict:
    """Which dimensions are marked at the last of these calls; values are shapes."""
    shapes = DynamicShapes()
    for call in calls:
        tensors = [(where, torch.empty(size, dtype=dtype)) for where, (dtype, *size) in call.items()]
        (shapes.mark_all if at_once else shapes.mark)(tensors, shapes.of(tensors))
    return {where: sorted(getattr(tensor, "_dynamo_weak_dynamic_indices", ())) for where, tensor in tensors}


FLOAT, INT = torch.float32, torch.int64


def text(rows: int, length: int, encoder: int, heads: int = 4, images: int = 3) -> dict:
    return {
        0: (FLOAT, rows, length, 32),
        "states": (FLOAT, rows, encoder, 32),
        "mask": (FLOAT, rows, 1, length, encoder),
        "bias": (FLOAT, 1, heads, length, length),
        "table": (FLOAT, 1, length, 8),
        "offsets": (INT, images),
    }


def test_calls_with_a_mask_are_of_other_sizes_than_those_without(monkeypatch):
    """Constants are compiled for the first of them. Forwards that score have none."""
    hidden, mask = torch.empty(2, 6, 32), torch.empty(2, 1, 6, 6, dtype=torch.bool)
    plain, masked, longer = [(0, hidden)], [(0, hidden), ("mask", mask)], [(0, torch.empty(2, 7, 32))]
    scaled = [(0, hidden), ("scale", torch.empty(8))]
    shapes, scored, marked = DynamicShapes(), DynamicShapes(), []
    monkeypatch.setattr(dynamic_shapes, "_mark", lambda tensors, seen, following: marked.append(following))
    for given in (plain, masked, plain, longer, scaled):
        shapes.mark(given, shapes.of(given))
        scored.mark_all(given, scored.of(given))
    assert marked[::2] == [False, True, False, True, False] and all(marked[1::2])


ALL = {0: [0, 1], "states": [0, 1], "mask": [0, 2, 3], "bias": [2, 3], "table": [1], "offsets": [0]}


@pytest.mark.parametrize(
    "calls, expected",
    [
        ([text(5, 20, 30)], {where: [0] if where == "offsets" else [] for where in ALL}),
        ([text(5, 20, 30), text(5, 20, 30)], {where: [0] if where == "offsets" else [] for where in ALL}),
        ([text(5, 20, 30), text(3, 33, 41)], ALL),
        ([text(5, 20, 30), text(5, 20, 31)], ALL),  # an encoder's length alone
        ([text(4, 20, 30), text(3, 33, 41)], ALL),  # heads equal the rows by chance
        ([text(5, 20, 20), text(3, 33, 41)], ALL),  # so do lengths
        ([text(5, 20, 30), {0: (FLOAT, 3, 33, 32)}, text(2, 9, 12)], ALL),
        ([text(5, 20, 30), text(3, 33, 41), text(5, 20, 30)], {w: [0] if w == "offsets" else [] for w in ALL}),
    ],
)
def test_which_sizes_are_symbols(calls, expected):
    assert learnt(*calls) == expected


@pytest.mark.parametrize(
    "shapes, expected",
    [
        ([(3, 8, 8, 16), (2, 8, 8, 16)], [0]),
        ([(8, 8, 8, 16), (2, 8, 8, 16)], [0]),  # as many as they are high, by chance
        ([(3, 8, 8, 16), (2, 8, 8, 16), (2, 6, 10, 16)], [0, 1, 2]),
        ([(3, 8, 8, 16), (3, 6, 8, 16)], [1]),
    ],
)
def test_heights_of_feature_maps_are_symbols_once_they_change(shapes, expected):
    assert learnt(*({0: (FLOAT, *shape)} for shape in shapes))[0] == expected


def test_forwards_that_score_have_symbols_at_once():
    assert learnt(text(5, 20, 30), at_once=True) == ALL


def test_an_argument_that_comes_later_follows_at_once():
    """A mask, say: its encoder's length was seen to change before."""
    plain = [
        {0: (FLOAT, rows, length, 32), "states": (FLOAT, rows, n, 32)} for rows, length, n in ((4, 9, 8), (3, 7, 6))
    ]
    assert learnt(*plain, text(2, 20, 30))["mask"] == [0, 2, 3]


def test_backends_are_equal_where_they_compile_alike():
    class Owner:
        def compile(self):
            raise NotImplementedError

    owner, region, other = Owner(), object(), object()
    made = [
        WeakBackend(owner.compile, *alike)
        for alike in (
            (CompiledAs(region, 0, KEEP),),
            (CompiledAs(region, 0, RECOMPUTE),),
            (CompiledAs(region, 1, KEEP),),
            (CompiledAs(other, 0, KEEP),),
            (CompiledAs(region, 0),),  # whose plan is not made yet
            (CompiledAs(region, 0),),
            (),
            (),
        )
    ]
    assert all((a == b) == (a is b) for a in made for b in made)
    made[4].compiled_as.plan = KEEP
    assert made[4] == made[0] and hash(made[4]) == hash(made[0])


class Numbered(nn.Module):
    """A layer that computes with its own number."""

    def __init__(self, number):
        super().__init__()
        self.norm, self.linear, self.number = nn.LayerNorm(8), nn.Linear(8, 8), number

    def forward(self, x):
        return x + self.linear(self.norm(x)) + (self.number % 3) * 0.01


class InHalves(nn.Module):
    """A layer whose two results are slices of one sum, as those of Flux's single blocks."""

    def __init__(self, number):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, a, b):
        x = torch.cat([b, a], 1)
        x = x + self.linear(self.norm(x)).sin()
        return x[:, b.shape[1] :], x[:, : b.shape[1]]


class Chain(nn.Module):
    def __init__(self, kind, count):
        super().__init__()
        self.layers, self.halves = nn.ModuleList(kind(number) for number in range(count)), kind is InHalves

    def forward(self, x):
        parts = (x[:, :3], x[:, 3:]) if self.halves else (x,)
        for layer in self.layers:
            made = layer(*parts)
            parts = made if self.halves else (made,)
        return torch.cat(parts, 1)


@pytest.mark.parametrize("kind, count", [(Numbered, 6), (InHalves, 3)])
def test_layers_are_compiled_with_their_rewrites(kind, count):
    """Remainders of their own integers are constants, and sizes are of the trace that they are in."""
    torch.manual_seed(0)
    reference = Chain(kind, count).double().train()
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    for rows, length in ((2, 7), (3, 9), (2, 8)):
        found = []
        for each in (model, reference):
            each.zero_grad()
            x = torch.randn(rows, length, 8, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
            each(x.requires_grad_()).square().mean().backward()
            found.append({name: p.grad for name, p in each.named_parameters()})
        assert max(zoo.errors(*found).values()) < 1e-9
    assert not fell_back(model), tunecompile.report(model)
    (match,) = [match for match in tunecompile.report(model).matches if match.family == "layer_norm"]
    assert match.rewritten
