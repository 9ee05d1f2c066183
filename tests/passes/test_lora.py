"""Low-rank adapters as PEFT and others write them; what is no adapter of a frozen linear."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph

from tests.support.passes import run
from tests.support.passes.functions import Siblings, lora, operands, rows_of
from tests.support.passes.run import assert_same, family, random
from tunecompile._torch.modules import linear as product
from tunecompile.compiler.backend import Backend
from tunecompile.passes import PIPELINE

check = partial(run.check, passes=family("lora"))
GROUPED = family("lora", "grouped_linear")


SPELLINGS = [
    lora,
    lambda x, w, a, b: 0.5 * F.linear(F.linear(x, a), b) + F.linear(x, w),
    lambda x, w, a, b: torch.add(F.linear(x, w), torch.mul(F.linear(F.linear(x, a), b), 2)),
    lambda x, w, a, b: (F.linear(x.to(x.dtype), w) + F.linear(F.linear(x.to(a.dtype), a), b) * 0.5).to(x.dtype),
    lambda x, w, a, b: lora(x, w, a, b, scale=1.0),
    lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a), b) * 1.0 * 0.5,
    lambda x, w, a, b: x @ w.T + x @ a.T @ b.T * 0.5,
    lambda x, w, a, b: torch.matmul(x, w.t()) + F.linear(F.linear(x, a), b) * 0.5,
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_matches(spelling):
    check(spelling, random(2, 3, 8), *operands(), expect={"lora_linear": 1})


def test_what_may_be_an_adapter():
    """The product with A, which only the one with B reads: not what is read twice, and no computed weight."""
    graph = Graph()
    x, w, a, b = (graph.placeholder(name) for name in "xwab")

    def linear(*args):
        return graph.call_function(product, args)

    inner = linear(x, a)
    twice, computed = linear(x, a), linear(w, a)
    outer = linear(inner, b)
    graph.output((outer, linear(x, w), linear(twice, b), linear(twice, w), linear(x, computed)))
    (adapters,) = [p for p in PIPELINE if p.name == "lora"]
    assert adapters.anchors(graph) == [inner]


def test_linears_behind_a_function_of_another_package(monkeypatch):
    """DeepSpeed's ZeRO-3 puts one in the place of torch's, for good."""
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda input, weight, bias=None: linear(input, weight, bias))
    check(lora, random(2, 3, 8), *operands(), expect={"lora_linear": 1})


@pytest.mark.parametrize("shape", [(8,), (1, 8), (1, 1, 8), (2, 0, 8)])
def test_any_rank_of_the_input(shape):
    check(lora, random(*shape), *operands(), expect={"lora_linear": 1})


def test_bias_and_other_widths():
    check(lora, random(2, 3, 8), *operands(bias=True), expect={"lora_linear": 1})
    check(lora, random(2, 3, 8), *operands(n=1, r=1, bias=True), expect={"lora_linear": 1})


def behind(x, w, bias):
    """Falcon's linears."""
    return x @ w.T + bias


class Turned(nn.Module):
    """An adapted linear in another spelling, with bias, as PEFT adds to it."""

    def __init__(self, spelling, dtype=torch.float32, dropout=0.0):
        super().__init__()
        self.spelling, self.dropout = spelling, nn.Dropout(dropout)
        self.w = nn.Parameter(torch.randn((8, 6) if spelling is rows_of else (6, 8), dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(6, dtype=dtype))
        self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(6, 2))

    def forward(self, x):
        result = self.spelling(x, self.w, self.bias)
        dtype = result.dtype
        return (result + F.linear(F.linear(self.dropout(x.to(self.a.dtype)), self.a), self.b) * 0.5).to(dtype)


def test_bias_beside_other_spellings_of_the_product():
    layer = Turned(behind)
    for shape in ((8,), (4, 8), (2, 3, 8), (2, 1, 3, 8), (2, 0, 8)):
        check(layer, random(*shape), expect={"lora_linear": 1}, parameters=list(layer.parameters()))
    check(layer, random(2, 3, 8), expect={"lora_linear": 1}, rows=(0, 1), parameters=list(layer.parameters()))
    half = Turned(behind, torch.bfloat16)
    check(
        half,
        random(2, 3, 8, dtype=torch.bfloat16),
        expect={"lora_linear": 1},
        parameters=list(half.parameters()),
        tol=1.5e-2,
    )
    assert any(
        node.target is F.dropout
        for node in check(Turned(behind, dropout=0.5), random(2, 3, 8), expect={"lora_linear": 1}, tol=9)
        .graphs[0]
        .nodes
    )


@pytest.mark.parametrize("spelling", [rows_of, behind])
def test_autocast_around_other_spellings_of_the_product(spelling):
    """A bias that is added to what autocast computes in half precision makes the sum fp32, which no adapted linear gives."""
    layer = Turned(spelling)
    with torch.autocast("cpu", torch.bfloat16):
        check(
            layer,
            random(2, 3, 8),
            expect={"lora_linear": 1} if spelling is rows_of else {},
            parameters=list(layer.parameters()),
            tol=1.5e-2,
        )


def test_a_trained_weight_of_rows():
    layer = Turned(rows_of)
    layer.w.requires_grad_()
    check(layer, random(2, 3, 8), expect={}, parameters=list(layer.parameters()))


@pytest.mark.parametrize("spelling", [None, rows_of, behind])
def test_a_bias_of_the_adapters_own(spelling):
    """It is scaled as the adapter is (PEFT's lora_bias)."""

    def fn(x, w, a, b, own, bias=None):
        base = F.linear(x, w, bias) if spelling is None else spelling(x, w.t() if spelling is rows_of else w, bias)
        return (base + F.linear(F.linear(x.to(a.dtype), a), b, own) * 0.25).to(base.dtype)

    for bias in [random(6)] if spelling else [None, random(6)]:
        seen = check(fn, random(2, 3, 8), *operands(), random(6), bias, expect={"lora_linear": 1})
        assert not seen.refused
    half = operands(dtype=torch.bfloat16, adapters=torch.float32)
    check(
        fn,
        random(2, 3, 8, dtype=torch.bfloat16),
        *half,
        random(6),
        random(6, dtype=torch.bfloat16),
        expect={"lora_linear": 1},
        tol=1.5e-2,
    )


@pytest.mark.parametrize("base", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_adapters_on_a_half_precision_base(base):
    def peft(x, w, a, b):
        result = F.linear(x, w)
        dtype = result.dtype
        result = result + F.linear(F.linear(x.to(a.dtype), a), b) * 0.5
        return result.to(dtype)

    w, a, b = operands(dtype=base, adapters=torch.float32)
    check(peft, random(2, 3, 8, dtype=base), w, a, b, expect={"lora_linear": 1}, tol=1e-2)


@pytest.mark.parametrize("params", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(params):
    def fn(x, w, a, b):
        with torch.autocast("cpu", torch.bfloat16):
            return lora(x, w, a, b)

    check(fn, random(2, 3, 8, dtype=params), *operands(dtype=params), tol=1.5e-2)
    check(fn, random(2, 3, 8), *operands(dtype=torch.float32), tol=1.5e-2)

    def around(x, w, a, b):
        return lora(x, w, a, b)

    with torch.autocast("cpu", torch.bfloat16):
        check(around, random(2, 3, 8), *operands(), expect={"lora_linear": 1}, tol=1.5e-2)


def test_two_adapters_on_one_base():
    check(
        lambda x, w, a, b, c, d: lora(x, w, a, b) + F.linear(F.linear(x, c), d) * 3.0,
        random(2, 3, 8),
        *operands(),
        *operands(r=3)[1:],
    )


def test_an_adapter_with_its_own_input():
    check(
        lambda x, z, w, a, b: F.linear(x, w) + F.linear(F.linear(z, a), b) * 0.5,
        random(2, 3, 8),
        random(2, 3, 8),
        *operands(),
        expect={"lora_linear": 1},
    )


def test_dynamic_shapes():
    layer = Siblings(1)
    check(layer, random(2, 3, 8), expect={"lora_linear": 1}, rows=(0, 1), parameters=layer.trained())


def test_a_dynamic_scale_is_made_a_constant():
    layer = Siblings(1)
    check(layer, random(2, 3, 8), dynamic=True, parameters=layer.trained())


def test_two_layers_of_one_region_with_two_scales():
    backend = Backend("test", PIPELINE, "eager")
    layer = torch.compile(lambda layer, x: layer(x), backend=backend)
    for scale in (0.5, 2.0, 3.0):
        one = Siblings(1)
        one.scales = [scale]
        x = random(2, 3, 8)
        assert_same(list(layer(one, x)), list(one(x)), 1e-5)
    assert not backend.failures
    assert all({t.family: t.rewritten for t in c.tallies}["lora"] == 1 for c in backend.contexts)


MUTATIONS = {
    "tensor scale": lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a), b) * a.sum(),
    "no scale": lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a), b),
    "activation between": lambda x, w, a, b: F.linear(x, w) + F.linear(torch.tanh(F.linear(x, a)), b) * 0.5,
    "difference": lambda x, w, a, b: F.linear(x, w) - F.linear(F.linear(x, a), b) * 0.5,
    "product": lambda x, w, a, b: F.linear(x, w) * (F.linear(F.linear(x, a), b) * 0.5),
    "bias on the way down": lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a, b[0]), b) * 0.5,
    "one number on the way up": lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a), b, w[:1, 0]) * 0.5,
    "bias on both ways": lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a, b[0]), b, w[:, 0]) * 0.5,
    "bias behind the scale": lambda x, w, a, b: F.linear(x, w) + (F.linear(F.linear(x, a), b) * 0.5 + w[:, 0]),
    "down is read": lambda x, w, a, b: (lambda d: (F.linear(x, w) + F.linear(d, b) * 0.5, d))(F.linear(x, a)),
    "base is read": lambda x, w, a, b: (lambda y: (y + F.linear(F.linear(x, a), b) * 0.5) * y)(F.linear(x, w)),
    "delta is read": lambda x, w, a, b: (lambda y: (F.linear(x, w) + y) * y)(F.linear(F.linear(x, a), b) * 0.5),
    "product with what is not transposed": lambda x, w, a, b: x @ w.reshape(8, 6) + F.linear(F.linear(x, a), b) * 0.5,
    "two biases": lambda x, w, a, b: F.linear(x, w) + b[:, 0] + b[:, 1] + F.linear(F.linear(x, a), b) * 0.5,
    "bias for each row": lambda x, w, a, b: F.linear(x, w) + w[:, :1] + F.linear(F.linear(x, a), b) * 0.5,
    "constant bias": lambda x, w, a, b: F.linear(x, w) + 1.0 + F.linear(F.linear(x, a), b) * 0.5,
    "bias that adds dims": lambda x, w, a, b: F.linear(x, w) + b.t()[:, None, None] + F.linear(F.linear(x, a), b) * 0.5,
    "base with its bias is read": lambda x, w, a, b: (lambda y: (y + F.linear(F.linear(x, a), b) * 0.5) * y)(
        F.linear(x, w) + b[:, 0]
    ),
    "a matrix is added to the rows": lambda x, w, a, b: (
        rows_of(x, w.t(), x.view(-1, 8)[:, :6]) + F.linear(F.linear(x, a), b) * 0.5
    ),
    "the bias of rows doubled": lambda x, w, a, b: (
        torch.addmm(b[:, 0], x.view(-1, 8), w.t(), beta=2).view(2, 6, 6) + F.linear(F.linear(x, a), b) * 0.5
    ),
    "the rows are read": lambda x, w, a, b: (lambda y: (y.view((2, 6, 6)) + F.linear(F.linear(x, a), b) * 0.5, y))(
        torch.addmm(b[:, 0], x.view(-1, 8), w.t())
    ),
    "rows of another tensor": lambda x, w, a, b: (
        rows_of(x[:1].repeat(2, 1, 1).view(12, 8), w.t(), b[:, 0]).view((2, 6, 6)) + F.linear(F.linear(x, a), b) * 0.5
    ),
    "base scaled": lambda x, w, a, b: F.linear(x, w) * 2.0 + F.linear(F.linear(x, a), b) * 0.5,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_does_not_match(name):
    check(MUTATIONS[name], random(2, 6, 8), *operands(), expect={})


def test_a_trained_base():
    w, a, b = operands()
    check(lora, random(2, 3, 8), w.requires_grad_(), a, b, expect={})
    check(lambda x, v, w, a, b: lora(x, w + v, a, b), random(2, 3, 8), random(6, 8), *operands(), expect={})


def test_broadcast_delta():
    """A single row of B added to every column."""
    check(
        lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a), b[:1]) * 0.5,
        random(2, 3, 8),
        *operands(),
        expect={},
    )
    check(
        lambda x, z, w, a, b: F.linear(x, w) + F.linear(F.linear(z, a), b) * 0.5,
        random(2, 3, 8),
        random(8),
        *operands(),
    )
    check(
        lambda x, z, w, a, b: F.linear(x, w) + F.linear(F.linear(z, a), b) * 0.5,
        random(3, 8),
        random(2, 3, 8),
        *operands(),
    )


def test_another_result_dtype():
    check(
        lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x.float(), a), b) * 0.5,
        random(2, 3, 8, dtype=torch.bfloat16),
        *operands(dtype=torch.bfloat16, adapters=torch.float32),
        expect={},
        tol=1e-2,
    )


def test_never_across_a_mutation():
    def between(x, w, a, b):
        y = x * 1.0
        base = F.linear(y, w)
        y.add_(1.0)
        return base + F.linear(F.linear(y, a), b) * 0.5

    def base(x, w, a, b):
        y = F.linear(x, w)
        y += F.linear(F.linear(x, a), b) * 0.5
        return y

    check(between, random(2, 3, 8, grad=False), *(t.detach() for t in operands()), expect={})
    check(base, random(2, 3, 8), *operands())


def test_an_adapter_of_an_adapter():
    check(
        lambda x, *o: lora(lora(x, *o[:3]), *o[3:]),
        random(2, 3, 8),
        *operands(n=8),
        *operands(),
        expect={"lora_linear": 2},
    )


# PEFT itself
