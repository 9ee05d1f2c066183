"""The joined MLP is its three projections and the activation between them."""

import sys

import pytest
import torch

from tests.support.ops.arguments import APART, JOINT, SCALES, dense_mlp, mlp_leaves, packed_mlp
from tests.support.ops.checks import assert_fake_is_real
from tunecompile.ops import gated_activation, lora_linear, lora_mlp


def apart(x, weights, a, b, activation):
    scales = SCALES[-len(weights) :]
    gate_up, _ = lora_linear(x, [], weights[:-1], [], a[:-1], b[:-1], scales[:-1], x.dtype, "dense")
    gate, up = gate_up.split(128, -1)
    act = gated_activation(gate, up, activation)
    return lora_linear(act, [], weights[-1:], [], a[-1:], b[-1:], scales[-1:], x.dtype, "dense")[0]


def assert_same_as_apart(arguments, weights):
    y = lora_mlp(*arguments)[0]
    expected = apart(arguments[0], weights, arguments[2], arguments[3], arguments[-1])
    assert torch.equal(y, expected)
    grad = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(v, mlp_leaves(arguments), grad) for v in (y, expected))
    assert all(torch.equal(o, t) for o, t in zip(ours, theirs))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(
    "dtype, adapted", [(torch.float32, None), (torch.bfloat16, torch.float32), (torch.float16, None)]
)
def test_values_and_gradients_are_those_of_the_parts(dtype, adapted, activation):
    arguments = dense_mlp(dtype, activation, adapted)
    assert_same_as_apart(arguments, arguments[1])


@pytest.mark.parametrize("double, shapes", [(True, APART), (False, APART), (True, JOINT)])
def test_over_packed_weights(double, shapes):
    assert_same_as_apart(*packed_mlp(double, shapes=shapes))


def test_one_projection_that_gives_gate_and_up():
    arguments = dense_mlp(torch.bfloat16, shapes=JOINT)
    assert_same_as_apart(arguments, arguments[1])


@pytest.mark.parametrize("shapes", [APART, JOINT])
def test_gradcheck(shapes):
    arguments, count = dense_mlp(torch.float64, shapes=shapes), len(shapes)
    assert torch.autograd.gradcheck(
        lambda x, *m: lora_mlp(x, arguments[1], m[:count], m[count:], *arguments[4:])[0],
        mlp_leaves(arguments),
        fast_mode=True,
    )


def test_fake_and_schema():
    for arguments in (dense_mlp(), dense_mlp(shapes=JOINT), packed_mlp(True)[0]):
        detached = torch.utils._pytree.tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, arguments)
        assert_fake_is_real(lora_mlp, *detached)
        y, *saved = lora_mlp(*detached)
        assert_fake_is_real(lora_mlp.backward_op, torch.randn_like(y), *detached, *saved)
    torch.library.opcheck(lora_mlp.overload, tuple(dense_mlp()))


def test_no_provider_on_a_cpu():
    assert lora_mlp.choose(dense_mlp(torch.bfloat16)).name == "reference"


def test_weights_that_are_stored_the_other_way_round_are_not_written_by_kernels(monkeypatch):
    module = sys.modules[lora_mlp.reference.__module__]
    monkeypatch.setattr(module, "refuse_gpu", lambda x: None)
    arguments = list(dense_mlp(torch.bfloat16))
    assert lora_mlp.choose(arguments).name == "joined"
    arguments[1] = [weight.t().contiguous().t() for weight in arguments[1]]
    assert lora_mlp.choose(arguments).name == "reference"
