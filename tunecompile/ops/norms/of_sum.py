"""A residual sum and its norm as one op: one read of each, and one pass for both gradients."""

import inspect
from collections.abc import Callable

from torch import Tensor

from tunecompile.ir.dispatch import by_position
from tunecompile.ir.op import Cost, Op, op

DOC = """Return a residual sum and its norm: one read of each, and one pass for both gradients.

    Args:
        x: as for `{norm}`, as those that are not named here.
        residual: as x, in shape and dtype.

    Returns:
        (`{norm}` of total, total), with total the sum of x and residual, rounded to their dtype: which the next
        residual addition reads.
    """
DOC_OF_GRADIENTS = """The gradients of `add_{norm}`; those of norm and residual path are added before rounding.

    Args:
        grad: of the norm.
        grad_total: of the sum, as out1.
        out1: the sum of x and residual. The others are those of `add_{norm}`.

    Returns:
        [dtotal, *those of `{norm}_backward` behind dx]. The first is the gradient of both x and residual.
    """


def of_sum(
    norm: Op,
    gradients: Callable[..., list[Tensor]],
    by_template: Callable[..., list[Tensor | None]],
    refuses: Callable,
    because: str,
    shapes: tuple[Callable | None, Callable | None] = (None, None),
) -> Op:
    """The op `add_<norm>`, whose arguments are the norm's with `residual` behind x; with providers of both backwards.

    Args:
        norm: with its backward.
        gradients: takes grad, x and what else the norm's backward saves; returns what that does, dx before rounding.
        by_template: the same by a kernel; it also takes `residual_grad`, None for the norm's own, and `used`.
        refuses: takes x, a list of incoming gradients, and what else is saved; why the kernel cannot run, or None.
        because: what the kernel gains.
        shapes: as for `op`, of the new op and of its backward.
    """
    types = inspect.get_annotations(norm.reference, eval_str=True)
    types |= {"residual": Tensor, "return": tuple[Tensor, Tensor]}

    def add(*, x, residual, **rest):
        total = x + residual
        return norm.reference(total, **rest), total

    def backward(*, grad, grad_total, out1, **rest):
        dx, *others = gradients(grad, out1, **rest)
        return [(dx + grad_total).to(out1.dtype), *others]

    name = norm.name
    add.__name__, add.__doc__, add.__annotations__ = f"add_{name}", DOC.format(norm=name), types
    add = by_position(add, ("x", "residual", *norm.parameters[1:]), types)
    made = op(cost=Cost.POINTWISE, shapes=shapes[0], example=lambda draw: norm.example(draw, before=2))(add)
    assert norm.formula is not None and norm.backward_op is not None
    names = ("grad", "grad_total", "out1", *norm.formula.saves[1:])
    backward.__name__, backward.__doc__ = f"{made.name}_backward", DOC_OF_GRADIENTS.format(norm=name)
    backward = by_position(
        backward, names, {each: types.get(each, Tensor) for each in names} | {"return": list[Tensor]}
    )
    gives = (("x", "residual"), *norm.formula.gives[1:])
    of_both = made.backward(gives=gives, outputs=2, shapes=shapes[1], widens=True)(backward)

    @norm.backward_op.provider("triton", because=because, refuses=lambda grad, x, *rest: refuses(x, [grad], *rest))
    def _(*, used, **given):
        return by_template(**given, residual_grad=None, used=used)

    @of_both.provider(
        "triton", because=because, refuses=lambda grad, total_grad, x, *rest: refuses(x, [grad, total_grad], *rest)
    )
    def _(*, used, grad_total, out1, **given):
        return by_template(**given, x=out1, residual_grad=grad_total, used=used)

    return made
