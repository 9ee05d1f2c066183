"""How often layers are compiled, whatever batches come: as few graphs as there are kinds of calls, and a second for changing sizes."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_same_step
from tests.support.models.pairs import attending, pair, small
from tests.support.notes import fell_back, find, has
from tunecompile.compiler.backend import CompiledAs, WeakBackend
from tunecompile.planner.solver import KEEP, RECOMPUTE
from tunecompile.runtime.layers import compiled_layer, dynamic_shapes
from tunecompile.runtime.layers.dynamic_shapes import DynamicShapes
from tunecompile.runtime.layers.region import pieces_of

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SHAPES = ((4, 20), (3, 33), (2, 47), (5, 15), (4, 20), (2, 90))
SEQ2SEQ = dict(vocab_size=256, d_model=32, dropout=0.0, pad_token_id=0, decoder_start_token_id=2, bos_token_id=1)


def compiles(model) -> list[int]:
    return [region.compiles for region in tunecompile.report(model).regions]


def bart():
    torch.manual_seed(0)
    halves = {
        f"{half}_{name}": value
        for half in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    return tf.BartForConditionalGeneration(tf.BartConfig(**SEQ2SEQ, **halves, eos_token_id=2, attention_dropout=0.0))


def translation(rows: int, length: int, target: int, seed: int) -> dict:
    source, labels = (zoo.batch(256, rows, n, seed=seed + n)["input_ids"] for n in (length, target))
    return {"input_ids": source, "labels": labels}


def test_batches_of_many_shapes():
    model, reference = pair(attending)
    for seed, (rows, length) in enumerate(SHAPES):
        assert_same_step(model, reference, zoo.batch(256, rows, length, seed=seed))
    assert compiles(model) == [2]


@pytest.mark.slow
def test_an_encoders_length_that_the_decoders_does_not_follow():
    model, reference = pair(bart)
    for seed, ((rows, length), target) in enumerate(zip(SHAPES, (12, 17, 9, 22, 12, 40))):
        inputs = translation(rows, length, target, seed)
        assert model(**inputs).loss.item() == pytest.approx(reference(**inputs).loss.item(), rel=1e-5)
    assert compiles(model) == [2, 2]
    (head,) = [m for m in tunecompile.report(model).matches if m.family == "linear_cross_entropy"]
    assert (head.found, head.rewritten) == (1, 1)  # with the bias beside it


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


class Broken(nn.Module):
    """A layer that Dynamo cuts into pieces."""

    def __init__(self):
        super().__init__()
        self.linear, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, scale=None):
        y = self.linear(x if scale is None else x * scale).softmax(-1)
        torch._dynamo.graph_break()
        return x + self.out(y).tanh()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Broken() for _ in range(3))

    def forward(self, x, **given):
        for layer in self.layers:
            x = layer(x, **given) if given else layer(x, None)
        return x


def pieces_step(models, rows: int = 3, **given) -> list[int]:
    """One step of both models, compared; how often pieces were compiled so far, the most frequent first."""
    x, grads = torch.randn(rows, 5, 8, generator=torch.Generator().manual_seed(rows)), []
    for model in models:
        model.zero_grad()
        model(x, **given).square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    (region,) = models[0]._tunecompile.regions
    frames = (c.frame for backend in region.backends.values() for c in backend.contexts)
    return sorted(Counter(frames).values(), reverse=True)


@pytest.mark.slow
def test_pieces_of_a_layer_serve_all_kinds_of_its_calls():
    """The piece behind the break is the same with a scale and without."""
    models = pair(Stack)
    scale = torch.full((8,), 0.5)
    assert pieces_step(models) == [1, 1]
    assert pieces_step(models, scale=scale) == [2, 1]
    assert pieces_step(models, scale=scale, rows=4) == [3, 2]
    assert pieces_step(models, rows=4) == [4, 2]
    assert pieces_step(models, scale=None) == [4, 2]  # another kind of call, all of whose pieces are there
    assert not find(models[0], "ran-eagerly"), tunecompile.report(models[0])


@pytest.mark.slow
def test_pieces_are_not_shared_by_plans_nor_by_calls_with_other_hooks(monkeypatch):
    models = pair(Stack)
    assert pieces_step(models) == [1, 1]
    for model in models:  # inside the second piece, which another kind of calls shares so far
        for layer in model.layers:
            layer.out.register_forward_hook(lambda module, args, output: 2 * output)
    assert pieces_step(models) == [2, 2]
    monkeypatch.setattr(compiled_layer, "KEEP", RECOMPUTE)  # what layers follow without a budget
    assert pieces_step(models) == [3, 3]
    (region,) = models[0]._tunecompile.regions
    assert [c.plan for backend in region.backends.values() for c in backend.contexts] == 4 * [KEEP] + 2 * [RECOMPUTE]
    assert len(pieces_of(region)) == 2


@pytest.mark.slow
def test_adapters_that_a_router_mixes_by_task():
    """PEFT's Poly reads tasks' numbers on the host, so layers are in pieces."""
    peft = pytest.importorskip("peft")
    options = dict(r=4, n_tasks=3, n_skills=2, n_splits=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model, reference = pair(lambda: peft.get_peft_model(small(), peft.PolyConfig(**options)))
    for seed in range(5):
        inputs = {**zoo.batch(256, 3, 12, seed=seed), "task_ids": torch.tensor([seed % 3, 1, (seed + 1) % 3])}
        torch.manual_seed(seed)  # its router draws
        loss = model(**inputs).loss
        loss.backward()
        torch.manual_seed(seed)
        expected = reference(**inputs).loss
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        assert theirs.grad is None or torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)
    report = tunecompile.report(model)
    assert len(report.regions[0].recompiles) <= 1 and has(report, "graph-break"), report


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
