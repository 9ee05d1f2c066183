"""How an op's functions are called: its kernel, those of some of its arguments, and its derivative, another op."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunecompile._torch.autograd import no_autocast
from tunecompile.errors import NoSecondDerivative


def without_autocast(fn: Callable) -> Callable:
    """Return the same function with autocast off: an op chooses its dtypes, and autocast must not cast inside it.

    Args:
        fn: of tensors and constants.
    """

    @functools.wraps(fn)
    def kernel(*args, **kwargs):
        with no_autocast():
            return fn(*args, **kwargs)

    return kernel


def takes_by_name(fn: Callable) -> bool:
    """Return whether a function takes some of an op's arguments as keywords, and the rest as `**name`."""
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in inspect.signature(fn).parameters.values())


def by_position(fn: Callable, names: Sequence[str], types: Mapping[str, Any] | None = None) -> Callable:
    """Return a function that takes keywords and `**name`, to be called by position; others as they are.

    Args:
        fn: of an op's arguments.
        names: of these, in order.
        types: of these and of the result, for a function that an op's schema is read from.
    """
    if not takes_by_name(fn):
        return fn

    @functools.wraps(fn)
    def bound(*args: Any, **filled_in: Any) -> Any:
        return fn(**dict(zip(names, args)), **filled_in)

    if types is not None:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind, annotation=types[name]) for name in names]
        bound.__signature__ = inspect.Signature(parameters, return_annotation=types["return"])
    return bound


def declared_of(fn: Callable, names: Sequence[str]) -> Callable:
    """Return a function of some of an op's arguments, to be called with all of them by position.

    A function that declares some of the op's parameters receives these; one with `*args` or other names receives all
    arguments by position.

    Args:
        fn: a `supports` or `refuses` function.
        names: of the op's parameters.
    """
    declared = inspect.signature(fn).parameters
    positional = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in declared.values())
    if positional or not declared.keys() <= set(names):
        return fn
    places = {name: names.index(name) for name in declared}

    @functools.wraps(fn)
    def bound(*args: Any) -> Any:
        return fn(**{name: args[place] for name, place in places.items()})

    return bound


@dataclass(frozen=True)
class Formula:
    """What `Op.backward` was told."""

    parameters: tuple[str, ...]  #: names of the op's arguments
    backward_op: Callable  #: takes the incoming gradients, then the saved values
    saves: tuple[str, ...]  #: names of arguments, and `out0`, `out1`, ... for outputs
    gives: tuple[tuple[str, ...], ...]  #: names of arguments that get a gradient; those of one tuple share it
    differentiable: int  #: how many outputs, counted from the first, have a gradient


def rules(formula: Formula) -> tuple[Callable, Callable]:
    """Return what torch's autograd calls: save what the formula names, and call its backward op with it.

    Args:
        formula: the derivative of an op.

    Returns:
        `setup_context` and `backward`, as `torch.library.register_autograd` takes them.
    """
    names = formula.parameters

    def setup_context(ctx, inputs, output):
        values = dict(zip(names, inputs))
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        values.update({f"out{i}": value for i, value in enumerate(outputs)})
        ctx.mark_non_differentiable(*outputs[formula.differentiable :])
        # torch requires a list of gradients for every Tensor[] input, even for an empty one
        ctx.absent = {name for shared in formula.gives for name in shared if values[name] is None}
        ctx.blank = {name: [None] * len(values[name]) if _is_tensor_list(values[name]) else None for name in names}
        tensors, ctx.saved_spec = torch.utils._pytree.tree_flatten([values[name] for name in formula.saves])
        ctx.kept = [None if isinstance(value, torch.Tensor) else (value,) for value in tensors]
        ctx.save_for_backward(*(value for value in tensors if isinstance(value, torch.Tensor)))

    def backward(ctx, *grads):
        gradients = dict(ctx.blank)
        if grads[0] is not None:
            tensors = iter(ctx.saved_tensors)
            flat = [next(tensors) if kept is None else kept[0] for kept in ctx.kept]
            saved = torch.utils._pytree.tree_unflatten(flat, ctx.saved_spec)
            computed = iter(formula.backward_op(*grads[: formula.differentiable], *saved))
            for shared in formula.gives:
                blank = ctx.blank[shared[0]]
                gradient = next(computed) if blank is None else [next(computed) for _ in blank]
                gradients.update({name: gradient for name in shared if name not in ctx.absent})
        return tuple(gradients[name] for name in names)

    return setup_context, backward


def register_formula(library: torch.library.Library, name: str, formula: Formula) -> None:
    """Register the derivative of an op.

    Args:
        library: that defines the op.
        name: of the op, without its namespace.
        formula: its derivative.
    """
    setup_context, backward = rules(formula)
    torch.library.register_autograd(f"{library.ns}::{name}", backward, setup_context=setup_context, lib=library)


def refuse_second_derivative(library: torch.library.Library, name: str) -> None:
    """Make a double backward raise. Without a formula, torch would treat the gradient as a constant, and only warn.

    Args:
        library: that defines the backward op.
        name: of the backward op, without its namespace.
    """

    def refuse(ctx, *grads):
        raise NoSecondDerivative(name=name)

    torch.library.register_autograd(f"{library.ns}::{name}", refuse, lib=library)


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(member, torch.Tensor) for member in value)
