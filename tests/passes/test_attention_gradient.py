"""The gradient of attention's output reaches cuDNN as the output lies."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tunecompile._torch.cuda import attention_order
from tunecompile.compiler.pass_manager import Context
from tunecompile.passes.lower import attention_gradient

ROWS, TOKENS, HEADS, DIM = 2, 64, 4, 64


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, DIM)).transpose(1, 2)


def gradients(q, grad):
    """Gradients of one tensor for query, key and value."""
    aten = torch.ops.aten
    out, *saved = aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.0, False, False)
    sums, *lengths, seed, offset = saved[:7]
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, q, q, out, sums, seed, offset, None, *lengths, 0.0, False, scale=0.125
    )


def lowered(*inputs, dynamic=False):
    gm = make_fx(gradients, tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    attention_gradient.PASS.run(gm.graph, Context("layer"))
    gm.graph.lint()
    gm.recompile()
    return gm, next(node for node in gm.graph.nodes if "attention_backward" in str(node.target))


def given(device, *widths, dtype=torch.bfloat16):
    """Query, key and value at once; then gradients that are the first columns of rows of so many heads."""
    made = [torch.randn(ROWS, TOKENS, width * HEADS * DIM, device=device, dtype=dtype) for width in (1, *widths)]
    return [heads(x[..., : HEADS * DIM]) for x in made]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("width, copies", [(1, 0), (3, 1)])
def test_a_gradient_inside_wider_rows_is_copied(width, copies, dynamic):
    gm, call = lowered(*given("meta", width), dynamic=dynamic)
    grad, out = (call.args[at].meta["val"] for at in (0, 4))
    assert list(map(str, grad.stride())) == list(map(str, out.stride()))
    assert sum(node.target is torch.ops.aten.clone.default for node in gm.graph.nodes) == copies


@pytest.mark.gpu
def test_gradients_are_right_whatever_was_called_before():
    q, dense, wide = given("cuda", 1, 3)
    gradients(q, dense)  # plans for such calls lie in memory now
    with attention_order(["math"]):
        x = q.double().requires_grad_()
        attention = torch.nn.functional.scaled_dot_product_attention(x, x, x, scale=0.125)
        (right,) = torch.autograd.grad(attention, x, wide.double())
    error = (sum(part.double() for part in lowered(q, wide)[0](q, wide)) - right).norm() / right.norm()
    assert error < 0.02
