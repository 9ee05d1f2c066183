"""Gated activations against fp64 autograd."""

import pytest
import torch

from tests.support.ops.templates import REFERENCE, make, reference

pytest.importorskip("triton")
from tunecompile.ops.swiglu import largest_inside  # noqa: E402
from tunecompile.templates import swiglu  # noqa: E402

DTYPES = (torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow), torch.float32)


@pytest.mark.parametrize("activation", REFERENCE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 2, 576), (3, 1536)])
def test_against_fp64(device, error, bound, dtype, activation, shape):
    gate, up, grad = (make(shape, device, dtype, i) for i in range(3))
    y = reference(gate, up, activation)
    assert error(swiglu.forward(gate, up, activation), y) < bound(dtype)
    got = swiglu.backward(grad, gate, up, activation)
    for value, expected in zip(got, reference(gate, up, activation, grad)):
        assert value.dtype == dtype and error(value, expected) < bound(dtype)
    assert got[0].data_ptr() + shape[-1] * got[0].element_size() == got[1].data_ptr()  # the halves of one buffer


@pytest.mark.parametrize("activation", REFERENCE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 576, 1536])
def test_a_weight_for_each_row(device, error, bound, dtype, activation, columns):
    both, grad = make((5, 2 * columns), device, dtype, 0), make((5, columns), device, dtype, 2)
    gate, up, weights = both[:, :columns], both[:, columns:], make((5, 1), device, torch.float32, 3)
    d_gate, d_up = reference(gate, up, activation, grad.double() * weights)
    d_weights = (reference(gate, up, activation) * grad.double()).sum(1, keepdim=True)
    got = swiglu.weighted_backward(grad, gate, up, weights, activation)
    for value, expected, like in zip(got, (d_gate, d_up, d_weights), (gate, up, weights)):
        assert value.dtype == like.dtype and value.shape == like.shape and error(value, expected) < bound(like.dtype)
    assert got[0].data_ptr() + columns * got[0].element_size() == got[1].data_ptr()


@pytest.mark.parametrize("order", ("gate_up", "up_gate"))
def test_column_slices_of_one_projection(device, error, order):
    buffer, wide = make((5, 200), device, torch.float32, 0), make((5, 103), device, torch.float32, 1)
    gate, up = (buffer[:, :100], buffer[:, 100:]) if order == "gate_up" else (buffer[:, 100:], buffer[:, :100])
    grad = wide[:, 3:]
    assert error(swiglu.forward(gate, up), reference(gate, up, "silu")) < 2e-6
    for got, expected in zip(swiglu.backward(grad, gate, up), reference(gate, up, "silu", grad)):
        assert error(got, expected) < 2e-6


@pytest.mark.parametrize("activation", REFERENCE)
def test_large_gates(device, error, activation):
    gate = torch.tensor([[-200.0, -30.0, -1.0, 0.0, 1.0, 30.0, 200.0]], device=device)
    up, grad = torch.full_like(gate, 2.0), torch.full_like(gate, 3.0)
    assert error(swiglu.forward(gate, up, activation), reference(gate, up, activation)) < 2e-6
    for got, expected in zip(swiglu.backward(grad, gate, up, activation), reference(gate, up, activation, grad)):
        assert got.isfinite().all() and error(got, expected) < 2e-6


def test_unknown_activation(device):
    with pytest.raises(ValueError, match="activation"):
        swiglu.forward(torch.ones(1, 2, device=device), torch.ones(1, 2, device=device), "relu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1), (2, 3, 7), (3, 1536), pytest.param((16384, 2880), marks=pytest.mark.gpu)], ids=str
)
def test_a_clamped_gate_against_fp64(device, error, bound, dtype, shape):
    both, grad = 4 * make((*shape[:-1], 2 * shape[-1]), device, dtype, 0), make(shape, device, dtype, 1)
    exact = both.double().requires_grad_()
    gate, up = exact[..., ::2].clamp(max=7.0), exact[..., 1::2].clamp(-7.0, 7.0)
    expected = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    expected.backward(grad.double())
    assert error(swiglu.clamped(both, 1.702, 7.0), expected.detach()) < bound(dtype)
    found = swiglu.clamped_backward(grad, both, 1.702, largest_inside(7.0))
    assert error(found, exact.grad) < bound(dtype) and found.dtype == dtype
    assert torch.equal(found == 0, exact.grad == 0) or dtype != torch.float32


def test_a_clamped_gate_keeps_what_is_no_number(device):
    both = torch.tensor([[float("nan"), 1.0, 1.0, float("nan"), float("inf"), 1.0]], device=device)
    assert swiglu.clamped(both, 1.702, 7.0).isnan().tolist() == [[True, True, False]]
    found = swiglu.clamped_backward(torch.ones(1, 3, device=device), both, 1.702, 7.0)
    assert found[0, 0] == 0 and found[0, 3] == 0 and found[0, 4] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("activation", REFERENCE)
@pytest.mark.parametrize("rows,columns", [(8192, 14336), (8192, 8192), (1000, 1536)])
def test_real_size(gpu_only, device, error, bound, activation, rows, columns):
    buffer = make((rows, 2 * columns), device, torch.bfloat16, 0)
    gate, up = buffer[:, :columns], buffer[:, columns:]
    grad = make((rows, columns), device, torch.bfloat16, 1)
    assert error(swiglu.forward(gate, up, activation), reference(gate, up, activation)) < bound(torch.bfloat16)
    for got, expected in zip(swiglu.backward(grad, gate, up, activation), reference(gate, up, activation, grad)):
        assert error(got, expected) < bound(torch.bfloat16)
