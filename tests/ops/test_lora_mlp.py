"""The joined MLP is its three projections and the activation between them."""

import sys

import pytest
import torch

from tests.support.checks import assert_fake_is_real
from tunecompile.ops import gated_activation, lora_linear, lora_mlp

SCALES = [0.5, 2.0, 1.5]


def adapters(dtype, columns=64, inner=128, out=16, ranks=(2, 1, 3)):
    shapes = ((inner, columns), (inner, columns), (out, inner))
    a = [(torch.randn(r, k) / k**0.5).to(dtype).requires_grad_() for r, (_, k) in zip(ranks, shapes)]
    b = [torch.randn(n, r).to(dtype).requires_grad_() for r, (n, _) in zip(ranks, shapes)]
    return shapes, a, b


def dense(dtype=torch.float32, activation="silu", adapted=None):
    shapes, a, b = adapters(adapted or dtype)
    x = torch.randn(2, 3, 64).to(dtype).requires_grad_()
    weights = [(torch.randn(shape) / shape[1] ** 0.5).to(dtype) for shape in shapes]
    return [x, weights, [], [], [], [], [], a, b, SCALES, [128, 128, 16], 0, "", activation]


def packed(double, activation="silu"):
    pytest.importorskip("bitsandbytes")
    from tests.ops.test_nf4 import quantized

    arguments = dense(activation=activation)
    made = [quantized(*w.shape, double=double, dtype=torch.float32) for w in arguments[1]]
    arguments[1] = []
    arguments[2:7] = [[args[i] for args, _ in made] if double or i < 2 else [] for i in range(5)]
    arguments[11:13] = [64, "nf4"]
    return arguments, [expected for _, expected in made]


def leaves(arguments):
    return [arguments[0], *arguments[7], *arguments[8]]


def apart(x, weights, a, b, activation):
    gate_up, _ = lora_linear(x, [], weights[:2], [], a[:2], b[:2], SCALES[:2], x.dtype)
    gate, up = gate_up.split(128, -1)
    return lora_linear(gated_activation(gate, up, activation), [], weights[2:], [], a[2:], b[2:], SCALES[2:], x.dtype)[
        0
    ]


def assert_same_as_apart(arguments, weights):
    y = lora_mlp(*arguments)[0]
    expected = apart(arguments[0], weights, arguments[7], arguments[8], arguments[-1])
    assert torch.equal(y, expected)
    grad = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(v, leaves(arguments), grad) for v in (y, expected))
    assert all(torch.equal(o, t) for o, t in zip(ours, theirs))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(
    "dtype, adapted", [(torch.float32, None), (torch.bfloat16, torch.float32), (torch.float16, None)]
)
def test_values_and_gradients_are_those_of_the_parts(dtype, adapted, activation):
    arguments = dense(dtype, activation, adapted)
    assert_same_as_apart(arguments, arguments[1])


@pytest.mark.parametrize("double", [True, False])
def test_over_packed_weights(double):
    assert_same_as_apart(*packed(double))


def test_gradcheck():
    arguments = dense(torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, *m: lora_mlp(x, *arguments[1:7], m[:3], m[3:], *arguments[9:])[0], leaves(arguments), fast_mode=True
    )


def test_fake_and_schema():
    for arguments in (dense(), packed(True)[0]):
        detached = torch.utils._pytree.tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, arguments)
        assert_fake_is_real(lora_mlp, *detached)
        y, *saved = lora_mlp(*detached)
        assert_fake_is_real(lora_mlp.backward_op, torch.randn_like(y), *detached, *saved)
    torch.library.opcheck(lora_mlp.overload, tuple(dense()))


def test_no_provider_on_a_cpu():
    assert lora_mlp.choose(dense(torch.bfloat16)).name == "reference"


def test_weights_that_are_stored_the_other_way_round_are_not_written_by_kernels(monkeypatch):
    module = sys.modules[lora_mlp.reference.__module__]
    monkeypatch.setattr(module, "refuse_gpu", lambda x: None)
    arguments = list(dense(torch.bfloat16))
    assert lora_mlp.choose(arguments).name == "joined"
    arguments[1] = [weight.t().contiguous().t() for weight in arguments[1]]
    assert lora_mlp.choose(arguments).name == "reference"
