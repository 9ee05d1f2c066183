"""Ops outside of compiled code, by their providers: for functions that other packages call eagerly.

An op that is simply called runs its reference, which is the meaning of it, not the fast way.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tunecompile._torch.autograd import no_autocast
from tunecompile.ir.dispatch import Formula, rules
from tunecompile.ir.op import Op


def by_provider(op: Op, *args: Any) -> Any:
    """Call an op by the provider that compiled code would have, with its gradients.

    While a graph is traced, and where no provider supports the arguments, the op itself is called.

    Args:
        op: without a backward it is called itself, too.
        args: its arguments, by position.

    Returns:
        What the op returns.
    """
    if torch.compiler.is_compiling() or op.formula is None or op.choose(args).run is op.reference:
        return op(*args)
    flat, spec = tree_flatten(list(args))
    return _ByProvider.apply(op, spec, *flat)


class _ByProvider(torch.autograd.Function):
    """One call. Its arguments are an op, and the op's arguments as leaves."""

    @staticmethod
    def forward(op: Op, spec: Any, *flat: Any) -> Any:
        return _run(op, tree_unflatten(flat, spec))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        op, spec, *flat = inputs
        args = tree_unflatten(flat, spec)
        ctx.leaves = [len(tree_leaves(each)) for each in args]
        used = _used(op.formula, ctx.leaves, ctx.needs_input_grad[2:])
        formula = dataclasses.replace(op.formula, backward_op=functools.partial(_backward, op.backward_op, used))
        save, ctx.differentiate = rules(formula)
        save(ctx, args, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        found: list[Any] = [None, None]
        for gradient, count in zip(ctx.differentiate(ctx, *grads), ctx.leaves):
            found += gradient if isinstance(gradient, list) else [gradient] * count
        return tuple(found)


def _backward(op: Op, used: tuple[bool, ...], *args: Any) -> Any:
    return _run(op, args, used)


def _run(op: Op, args: Sequence[Any], used: tuple[bool, ...] | None = None) -> Any:
    """used: which outputs are read; None for all."""
    return run_provider(op.choose(args).run, args, used or (True,) * len(op.overload._schema.returns))


def run_provider(run: Callable, args: Sequence[Any], used: tuple[bool, ...]) -> Any:
    """Run a provider on real tensors, with what lowering would fill in (`tunecompile.ir.op.Op.provider`).

    Args:
        run: the provider's function.
        args: the op's arguments, by position.
        used: which outputs are read.

    Returns:
        What the op returns.
    """
    asked = inspect.signature(run).parameters
    told = {name: value for name, value in (("used", used), ("dying", ())) if name in asked}
    with no_autocast():
        return run(*args, **told)


def outputs(made: Any) -> list:
    """Return what an op made as a list."""
    return list(made) if isinstance(made, (tuple, list)) else [made]


def _used(formula: Formula, leaves: Sequence[int], needed: Sequence[bool]) -> tuple[bool, ...]:
    """Which gradients are read, in the order in which the backward returns them."""
    by_name, rest = {}, iter(needed)
    for name, count in zip(formula.parameters, leaves):
        by_name[name] = [next(rest) for _ in range(count)]
    found: list[bool] = []
    for shared in formula.gives:
        found += [any(members) for members in zip(*(by_name[name] for name in shared))]
    return tuple(found)
