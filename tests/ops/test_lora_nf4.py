"""LoRA over packed weights is LoRA over the weights they stand for."""

import pytest
import torch

from tests.support.ops.arguments import dense_and_packed, lora_arguments, lora_leaves, with_lora_leaves
from tests.support.ops.checks import assert_fake_is_real
from tunecompile.ops import lora_linear, lora_linear_nf4
from tunecompile.ops.lora_nf4 import backward_flops, forward_flops

pytest.importorskip("bitsandbytes")
from tests.support.ops.arguments import quantized


def packed_leaves(packed, new):
    x, inputs, p, m, c, s, o, biases, a, b, scales, dtype, *rest = packed
    x, inputs, _, biases, a, b, _, _ = with_lora_leaves([x, inputs, None, biases, a, b, None, None], new)
    return [x, inputs, p, m, c, s, o, biases, a, b, scales, dtype, *rest]


@pytest.mark.parametrize("case", [dict(), dict(bias=True), dict(own=True, bias=True)], ids=str)
@pytest.mark.parametrize("sizes, ranks", [((6,), (2,)), ((8, 3, 5), (4, 1, 2))])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(
    "dtype, adapters", [(torch.float32, None), (torch.bfloat16, torch.float32), (torch.float16, None)]
)
def test_values_and_gradients_are_those_of_the_dense_op(dtype, adapters, double, sizes, ranks, case):
    dense, packed = dense_and_packed(dtype, double, sizes, ranks, adapters, **case)
    ours, theirs = ([t.detach().requires_grad_() for t in lora_leaves(dense)] for _ in range(2))
    y, xa = lora_linear_nf4(*packed_leaves(packed, ours))
    expected, expected_xa = lora_linear(*with_lora_leaves(dense, theirs))
    assert torch.equal(y, expected) and torch.equal(xa, expected_xa)
    grad = torch.randn(y.shape).to(dtype)
    y.backward(grad)
    expected.backward(grad)
    assert all(torch.equal(o.grad, t.grad) and o.grad.dtype == o.dtype for o, t in zip(ours, theirs))
    assert_fake_is_real(lora_linear_nf4, *packed)
    assert_fake_is_real(lora_linear_nf4.backward_op, grad, *packed, xa.detach())


def test_gradcheck():
    x = torch.randn(3, 64, dtype=torch.float64)
    dense = lora_arguments(x, (4, 3), (2, 1), bias=True, own=True)
    made = [quantized(n, 64, dtype=torch.float32)[0] for n in (4, 3)]
    packed = [x, dense[1], *[[m[i] for m in made] for i in range(5)], *dense[3:], [4, 3], 64, "nf4"]
    new = [t.detach().requires_grad_() for t in lora_leaves(dense)]
    assert torch.autograd.gradcheck(lambda *n: lora_linear_nf4(*packed_leaves(packed, n))[0], new, fast_mode=True)


def test_opcheck():
    dense, packed = dense_and_packed(torch.float32, True, (4, 3), (2, 1), bias=True, own=True)
    torch.library.opcheck(
        lora_linear_nf4.overload,
        tuple(packed_leaves(packed, [t.detach().requires_grad_() for t in lora_leaves(dense)])),
    )


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("case", [dict(), dict(own=True, bias=True)], ids=str)
def test_bitsandbytes_provider_gives_the_references_values(case, double):
    dense, packed = dense_and_packed(torch.float32, double, (8, 3), (4, 2), None, **case)
    y, xa = lora_linear_nf4(*packed)
    grad = torch.randn(y.shape)
    for op, args in ((lora_linear_nf4, packed), (lora_linear_nf4.backward_op, [grad, *packed, xa])):
        provider = op.choose(args)
        assert provider.name == "bitsandbytes"
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(provider.run(*args), op(*args)))


def test_operations_of_the_base_products_are_counted():
    """Of four bits each, two of a byte: a product and a sum for each weight and token, forward and backward."""
    x, packed = torch.empty(2, 5, 64), [torch.empty(n * 32, 1) for n in (8, 3)]
    expected = 2 * (2 * 5) * (8 + 3) * 64
    assert forward_flops(x, [], packed) == backward_flops(torch.empty(2, 5, 11), x, [], packed) == expected
