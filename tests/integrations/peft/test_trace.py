"""What Dynamo follows in the place of other packages' functions gives what they give, and leaves to them what it does not know."""

import sys
import types

import pytest
import torch
from torch import nn

from tunecompile.integrations.peft import trace

peft = pytest.importorskip("peft")


def itself(module):
    return "PEFT's way"


weight_of = trace._weight_of(itself)


def test_a_plain_weight():
    linear = nn.Linear(4, 4)
    assert weight_of(linear) is linear.weight
    linear.W_q = 1  # of HQQ
    assert weight_of(linear) == "PEFT's way"
    assert weight_of(types.SimpleNamespace(weight=torch.ones(2, 2))) == "PEFT's way"
    assert weight_of(types.SimpleNamespace(weight=nn.Buffer(torch.ones(2, 2)))) == "PEFT's way"


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_4_bits(kind, double, storage):
    bnb = pytest.importorskip("bitsandbytes")
    from tests.support import zoo

    linear = zoo.quantize(nn.Sequential(nn.Linear(64, 24)), double=double, kind=kind, storage=storage)[0]
    assert torch.equal(weight_of(linear), bnb.functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state))
    linear.weight.quant_state.shape = torch.Size((3, 8, 64))  # experts, say
    assert weight_of(linear) == "PEFT's way"
    linear.weight.quant_state.shape, linear.weight.quant_state.quant_type = torch.Size((24, 64)), "int4"
    assert weight_of(linear) == "PEFT's way"


@pytest.mark.parametrize("double", [False, True])
def test_products_with_4_bits(double):
    bnb = pytest.importorskip("bitsandbytes")
    from tests.support import zoo

    product = trace._product_of(lambda *given: "bitsandbytes' way")
    layer = zoo.quantize(nn.Sequential(nn.Linear(64, 24)), double=double)[0]
    weight, state, bias = layer.weight, layer.weight.quant_state, layer.bias
    x = torch.randn(3, 64, requires_grad=True)
    ours, theirs = (
        torch.autograd.grad(y.square().sum(), x)[0]
        for y in (product(x, weight, state, None, bias), bnb.matmul_4bit(x, weight, state, bias=bias))
    )
    assert torch.equal(ours, theirs)
    assert product(x.bfloat16(), weight, state).dtype == torch.bfloat16
    others = (torch.randn(3, 24), weight, state), (x, weight, state, torch.empty(3, 24)), (x, weight.t(), state)
    assert {product(*each) for each in others} == {"bitsandbytes' way"}
    state.packing_format_for_cpu = True
    assert product(x, weight, state) == "bitsandbytes' way"


def test_8_bits():
    bnb = pytest.importorskip("bitsandbytes")
    weight, scales = torch.randint(-127, 128, (4, 8), dtype=torch.int8), torch.rand(4)
    module = types.SimpleNamespace(
        weight=nn.Parameter(weight, requires_grad=False), state=types.SimpleNamespace(SCB=scales)
    )
    module.weight.__class__ = type("Packed", (nn.Parameter,), {})
    assert torch.equal(weight_of(module), bnb.functional.int8_vectorwise_dequant(weight, scales))
    module.state.SCB = None  # its linear has not run
    assert weight_of(module) == "PEFT's way"


def test_a_turned_weight():
    turned = trace._transposed(lambda weight, fan_in_fan_out: "PEFT's way")
    weight = nn.Parameter(torch.randn(2, 3))
    assert torch.equal(turned(weight, True), weight.T) and not turned(weight, True).requires_grad
    assert turned(weight, False) == turned(weight.data, True) == "PEFT's way"


def test_another_signature_and_another_substitute_are_left_alone(monkeypatch):
    def changed(module, device, dtype):
        return module.weight

    def ours(module):
        return module.weight

    monkeypatch.setitem(sys.modules, "peft.utils.integrations", types.SimpleNamespace(dequantize_module_weight=changed))
    trace.substitute()
    torch.compiler.substitute_in_graph(ours)(lambda module: 2 * module.weight)
    monkeypatch.setitem(sys.modules, "peft.utils.integrations", types.SimpleNamespace(dequantize_module_weight=ours))
    trace.substitute()
    linear = nn.Linear(2, 2)
    assert torch.equal(
        torch.compile(lambda m: changed(m, None, None) + ours(m), backend="eager", fullgraph=True)(linear),
        3 * linear.weight,
    )


def test_substituted_where_peft_is_imported_and_nowhere_else(monkeypatch):
    def theirs(module):
        torch._dynamo.graph_break()
        return module.weight

    registered = []
    substitute = torch.compiler.substitute_in_graph
    monkeypatch.setattr(torch.compiler, "substitute_in_graph", lambda of: registered.append(of) or substitute(of))
    monkeypatch.delitem(sys.modules, "peft.utils.integrations", raising=False)
    monkeypatch.delitem(sys.modules, "peft.utils.other", raising=False)
    monkeypatch.delitem(sys.modules, "bitsandbytes.autograd._functions", raising=False)
    trace.substitute()
    assert registered == []
    monkeypatch.setitem(sys.modules, "peft.utils.integrations", types.SimpleNamespace(dequantize_module_weight=theirs))
    for _ in range(2):
        trace.substitute()
    assert registered == [theirs]  # once
    linear = nn.Linear(2, 2)
    whole = torch.compile(lambda m: 2 * theirs(m), backend="eager", fullgraph=True)
    assert torch.equal(whole(linear), 2 * linear.weight)
