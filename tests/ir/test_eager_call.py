"""Ops by their providers, outside of compiled code: the same gradients, and only those that are read."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tunecompile.errors import NoSecondDerivative
from tunecompile.ir.eager_call import by_provider
from tunecompile.ir.op import Cost, op

seen: list = []  #: what providers were called with


@op(cost=Cost.MATMUL)
def eager_call_test_sum(
    x: Tensor, more: Sequence[Tensor], scales: Sequence[float], by: Tensor
) -> tuple[Tensor, Tensor]:
    """by (x + scaled others), and by."""
    return by * (x + sum(each * scale for each, scale in zip(more, scales))), by.clone()


@eager_call_test_sum.backward(saves=("more", "scales", "by", "x"), gives=("x", "more", "by"))
def eager_call_test_sum_backward(
    grad: Tensor, more: Sequence[Tensor], scales: Sequence[float], by: Tensor, x: Tensor
) -> list[Tensor]:
    """Its gradients."""
    total = x + sum(each * scale for each, scale in zip(more, scales))
    return [grad * by, *(grad * by * scale for scale in scales), grad * total]


@eager_call_test_sum.provider("twin", supports=lambda x: x.dtype == torch.float64)
def _(x, more, scales, by):
    seen.append("forward")
    return eager_call_test_sum.reference(x, more, scales, by)


@eager_call_test_sum_backward.provider("twin", supports=lambda x: x.dtype == torch.float64)
def _(grad, more, scales, by, x, *, used):
    seen.append(used)
    made = eager_call_test_sum_backward.reference(grad, more, scales, by, x)
    return [each if read else None for each, read in zip(made, used)]


def gradients(call, dtype):
    seen.clear()
    torch.manual_seed(0)
    x, a, b, by = (torch.randn(3, dtype=dtype) for _ in range(4))
    trained = [x.requires_grad_(), b.requires_grad_(), by.requires_grad_()]
    made, _ = call(x, [a, b], [1.0, 2.0], by)
    return torch.autograd.grad(made.sum(), trained)


def test_gradients_are_the_ops_own():
    found = gradients(lambda *args: by_provider(eager_call_test_sum, *args), torch.float64)
    assert seen == ["forward", (True, False, True, True)]
    assert all(map(torch.equal, found, gradients(eager_call_test_sum, torch.float64))) and not seen


def test_where_no_provider_supports_it_or_a_graph_is_traced():
    gradients(lambda *args: by_provider(eager_call_test_sum, *args), torch.float32)
    assert not seen
    compiled = torch.compile(lambda x, y: by_provider(eager_call_test_sum, x, [y], [1.0], y)[0], backend="eager")
    x = torch.ones(2, dtype=torch.float64)
    assert compiled(x, x).tolist() == [2.0, 2.0] and not seen


def test_a_second_derivative_is_refused():
    """torch would take the gradient for a constant."""
    x, by = (torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    (first,) = torch.autograd.grad(eager_call_test_sum(x, [], [], by)[0].sum(), [x], create_graph=True)
    with pytest.raises(NoSecondDerivative, match="eager_call_test_sum_backward"):
        first.sum().backward()


@op(cost=Cost.POINTWISE)
def eager_call_test_plain(x: Tensor) -> Tensor:
    """No gradient is known of it."""
    return x * 2


@eager_call_test_plain.provider("twin", supports=lambda x: True)
def _(x):
    seen.append("plain")
    return x * 2


def test_an_op_without_a_backward_is_called_itself():
    seen.clear()
    assert by_provider(eager_call_test_plain, torch.ones(2)).tolist() == [2.0, 2.0] and not seen
