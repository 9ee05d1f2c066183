"""Norms that are scaled and shifted by row of the batch: the formula and its gradients, alone and of a sum."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.ops.checks import assert_fake_is_real, error
from tunecompile.ir.op import has_triton
from tunecompile.ir.pretend_gpu import as_on_gpu
from tunecompile.ops import add_modulated_norm, modulated_norm

EPS = 1e-3
#: shape of x -> shapes of scale and shift
SHAPES = {(2, 3, 8): (2, 1, 8), (3, 2, 4): (1, 1, 4), (2, 3, 2, 4): (2, 1, 1, 4), (3, 8): (1, 8)}


def plain(x, scale, shift, offset, centred):
    made = F.layer_norm(x, x.shape[-1:], None, None, EPS) if centred else F.rms_norm(x, x.shape[-1:], None, EPS)
    return made * (offset + scale) + shift


def leaves(x, rows, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in (x, rows, rows)]


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("x, rows", SHAPES.items())
def test_gradcheck(x, rows, centred):
    given = leaves(x, rows)

    def of(x, scale, shift):
        return modulated_norm(x, scale, shift, EPS, 1.0, centred, x.dtype)

    assert torch.autograd.gradcheck(of, given)
    torch.testing.assert_close(of(*given), plain(*given, 1.0, centred), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("offset, centred", [(1.0, True), (0.0, False)])
def test_rounded_once(dtype, offset, centred, add):
    """In half precision nearer to fp64 than the sum of its roundings would be."""
    given = leaves((2, 5, 32), (2, 1, 32), dtype)
    wide = [each.detach().double().requires_grad_() for each in given]
    rest, grad = (EPS, offset, centred, dtype), torch.randn(2, 5, 32).to(dtype)
    if add:
        made, total = add_modulated_norm(given[0], given[0] * 0, *given[1:], *rest)
        exact = plain(*wide, offset, centred) + wide[0]
        made = made + total
        assert torch.equal(total, given[0])
    else:
        made, exact = modulated_norm(*given, *rest), plain(*wide, offset, centred)
    got, wanted = torch.autograd.grad(made, given, grad), torch.autograd.grad(exact, wide, grad.double())
    assert all(error(g, e) < 6 * torch.finfo(dtype).eps and g.shape == e.shape for g, e in zip(got, wanted))
    assert error(made, exact) < 6 * torch.finfo(dtype).eps and [g.dtype for g in got] == [dtype] * 3


@pytest.mark.parametrize("x, rows", SHAPES.items())
def test_shapes(x, rows):
    given, rest = leaves(x, rows, torch.bfloat16), (EPS, 1.0, True)
    assert_fake_is_real(modulated_norm, *given, *rest, torch.float32)
    assert_fake_is_real(modulated_norm.backward_op, given[0], *given, *rest)
    assert_fake_is_real(add_modulated_norm, given[0], *given, *rest, torch.bfloat16)


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_where_a_template_runs():
    x, short = (torch.empty(2, 4, width, dtype=torch.bfloat16) for width in (2048, 64))
    with as_on_gpu():
        for rows, given, chosen in (
            ((2, 1), x, "triton"),
            ((2, 1), short, "reference"),
            ((1, 1, 1), x[None], "reference"),
        ):
            scale = given.new_empty(*rows, given.shape[-1])
            for op, before in ((modulated_norm, (given,)), (add_modulated_norm, (given, given))):
                args = (*before, given, scale, scale, EPS, 1.0, True)
                assert op.backward_op.choose(args).name == chosen
