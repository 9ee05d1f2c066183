"""bitsandbytes layers, alone and below adapters."""

import operator
from functools import partial

import pytest
import torch
from torch import nn
from torch.fx import Graph

from tests.support.passes import run
from tests.support.passes.functions import linear_4bit
from tests.support.passes.run import family, random
from tunecompile.compiler.pass_manager import Context

bnb = pytest.importorskip("bitsandbytes")
PASSES = family("nf4")
check = partial(run.check, passes=PASSES)
ALL = family("nf4", "lora", "grouped_linear", "lora_nf4")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer(dtype, quant_type, double, bias):
    layer = linear_4bit(bias=bias, dtype=dtype, double=double, quant_type=quant_type)
    check(
        layer,
        random(2, 3, 64, dtype=dtype),
        expect={"dequantize_4bit": 1},
        parameters=[p for p in [layer.bias] if p is not None],
        tol=2e-5 if dtype == torch.float32 else 1.5e-2,
    )


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32], ids=str)
def test_bytes_that_are_stored_as_floats(storage):
    """So that FSDP shards them (bnb_4bit_quant_storage)."""
    check(linear_4bit(storage=storage), random(2, 3, 64), expect={"dequantize_4bit": 1}, tol=2e-5)


@pytest.mark.parametrize("shape", [(1, 64), (1, 1, 64), (5, 64)])
def test_any_rank_of_the_input(shape):
    check(linear_4bit(bias=True), random(*shape), tol=2e-5)


def test_blocks_of_another_size():
    check(linear_4bit(k=128, blocksize=128), random(2, 3, 128), expect={"dequantize_4bit": 1}, tol=2e-5)


def test_an_input_of_another_dtype_than_the_computation():
    layer = linear_4bit(dtype=torch.bfloat16)
    check(layer, random(2, 3, 64), tol=1.5e-2)


def test_two_layers_in_a_row():
    first, second = linear_4bit(n=64), linear_4bit()
    check(lambda x: second(first(x)), random(2, 3, 64), expect={"dequantize_4bit": 2}, tol=2e-5)


def test_a_frozen_input():
    check(
        lambda x, y: linear_(x) * y,
        random(2, 3, 64, grad=False),
        random(2, 3, 6),
        expect={"dequantize_4bit": 1},
        tol=2e-5,
    )


linear_ = linear_4bit()


def test_dynamic_shapes():
    check(linear_4bit(), random(2, 3, 64), expect={"dequantize_4bit": 1}, tol=2e-5, dynamic=True)


class Pair(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.q, self.k = linear_4bit(**options), linear_4bit(n=4, **options)

    def forward(self, x):
        return self.q(x), self.k(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_below_adapters(bias, dtype):
    peft = pytest.importorskip("peft")
    pair = Pair(bias=bias, dtype=dtype)
    model = peft.inject_adapter_in_model(peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q", "k"]), pair).train()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
        if name.endswith("bias"):
            p.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    check(
        model,
        random(2, 3, 64, dtype=dtype),
        passes=ALL,
        expect={"dequantize_4bit": 2, "lora_linear": 1},
        parameters=trained,
        tol=2e-5 if dtype == torch.float32 else 2e-2,
    )


def test_input_mutated_between_two_layers():
    def fn(x):
        y = x * 1.0
        a = layers.q(y)
        y.add_(1.0)
        return a, layers.k(y)

    layers = Pair()
    check(fn, random(2, 3, 64), passes=ALL, tol=2e-5)


def test_a_shape_that_an_earlier_piece_hands_over():
    """Where a graph breaks in the middle of bitsandbytes' code, it is an input of the next one."""
    graph = Graph()
    given = [graph.placeholder(name) for name in ("x", "packed", "shape", "absmax")]
    graph.output(graph.call_function(torch.ops.bitsandbytes.gemm_4bit.default, (*given, 64, "nf4")))
    context = Context("layer")
    PASSES[0].run(graph, context)
    assert context.tallies[0].rewritten == 0 and "no constant" in context.tallies[0].refused[0]


@pytest.mark.parametrize("mutated, stays", [("never", False), ("before", False), ("between", True), ("behind", False)])
def test_clones_go_where_nothing_is_mutated_before_they_are_read(mutated, stays):
    """Routers of many mixtures mutate their scores, behind PEFT's clones of 4-bit products."""
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")

    def mutate(when):
        if mutated == when:
            graph.call_method("mul_", (y, 2))

    mutate("before")
    clone = graph.call_method("clone", (x,))
    mutate("between")
    total = graph.call_function(operator.add, (clone, y))
    mutate("behind")
    graph.output(total)
    PASSES[0].run(graph, Context("layer"))
    assert any(node.target == "clone" for node in graph.nodes) is stays
