"""LoRA over packed weights is LoRA over the weights they stand for."""

import pytest
import torch

from tests.support.ops.arguments import dense_and_packed, lora_arguments, lora_leaves, with_lora_leaves
from tests.support.ops.checks import assert_fake_is_real
from tunecompile.ops import lora_linear

pytest.importorskip("bitsandbytes")
from tests.support.ops.arguments import NF4, quantized, tensors_of


@pytest.mark.parametrize("case", [dict(), dict(bias=True), dict(own=True, bias=True)], ids=str)
@pytest.mark.parametrize("sizes, ranks", [((6,), (2,)), ((8, 3, 5), (4, 1, 2))])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(
    "dtype, adapters", [(torch.float32, None), (torch.bfloat16, torch.float32), (torch.float16, None)]
)
def test_values_and_gradients_are_those_of_the_dense_op(dtype, adapters, double, sizes, ranks, case):
    dense, packed = dense_and_packed(dtype, double, sizes, ranks, adapters, **case)
    ours, theirs = ([t.detach().requires_grad_() for t in lora_leaves(dense)] for _ in range(2))
    y, xa = lora_linear(*with_lora_leaves(packed, ours))
    expected, expected_xa = lora_linear(*with_lora_leaves(dense, theirs))
    assert torch.equal(y, expected) and torch.equal(xa, expected_xa)
    grad = torch.randn(y.shape).to(dtype)
    y.backward(grad)
    expected.backward(grad)
    assert all(torch.equal(o.grad, t.grad) and o.grad.dtype == o.dtype for o, t in zip(ours, theirs))
    assert_fake_is_real(lora_linear, *packed)
    assert_fake_is_real(lora_linear.backward_op, grad, *packed, xa.detach())


def test_gradcheck():
    x = torch.randn(3, 64, dtype=torch.float64)
    dense = lora_arguments(x, (4, 3), (2, 1), bias=True, own=True)
    packed = [*dense[:2], tensors_of([quantized(n, 64) for n in (4, 3)]), *dense[3:-1], NF4]
    new = [t.detach().requires_grad_() for t in lora_leaves(dense)]
    assert torch.autograd.gradcheck(lambda *n: lora_linear(*with_lora_leaves(packed, n))[0], new, fast_mode=True)


def test_opcheck():
    _, packed = dense_and_packed(torch.float32, True, (4, 3), (2, 1), bias=True, own=True)
    new = [t.detach().requires_grad_() for t in lora_leaves(packed)]
    torch.library.opcheck(lora_linear.overload, tuple(with_lora_leaves(packed, new)))


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("case", [dict(), dict(own=True, bias=True)], ids=str)
def test_bitsandbytes_provider_gives_the_references_values(case, double):
    _, packed = dense_and_packed(torch.float32, double, (8, 3), (4, 2), None, **case)
    y, xa = lora_linear(*packed)
    grad = torch.randn(y.shape)
    for op, args in ((lora_linear, packed), (lora_linear.backward_op, [grad, *packed, xa])):
        provider = op.choose(args)
        assert provider.name == "bitsandbytes"
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(provider.run(*args), op(*args)))
