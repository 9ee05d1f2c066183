"""The net that looks at a pass's ops alone: schema, shape rule, gradients and providers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.utils._pytree import tree_leaves, tree_map

from tunecompile.compiler.pass_manager import Pass
from tunecompile.ir.op import OPS, Op
from tunecompile.verification.graph_nets import rewritten, through
from tunecompile.verification.pass_examples import Answer, Example, as_exact, in_fp64


class _Calls(Interpreter):
    """Runs a graph, and records the arguments of its ops."""

    def __init__(self, gm: GraphModule):
        super().__init__(gm)
        self.seen: list[tuple[Op, tuple]] = []

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        """Run one call."""
        if target in OPS:
            self.seen.append((OPS[target], args))
        return super().call_function(target, args, kwargs)


def ops_alone(passes: Sequence[Pass], example: Example) -> Iterator[Answer]:
    """Whether each op's schema and shape rule hold, its gradients are right, and its providers exact."""
    calls: list[_Calls] = []

    def change(gm: GraphModule) -> Callable:
        calls.append(_Calls(rewritten(passes, gm)[0]))
        return calls[-1].run

    through(example.function, change)(*in_fp64(example.args(torch.float64)))
    if not calls[-1].seen:
        yield "an op to look at", False, "nothing of the example is rewritten in float64"
    for op, args in calls[-1].seen:
        yield from _op(op, args)


def _op(op: Op, args: tuple) -> Iterator[Answer]:
    """All properties of one op, at the arguments of one call."""
    detached = tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, args)
    yield _registration(op, detached)
    trained = [
        i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.is_floating_point() and arg.requires_grad
    ]
    if trained and op.backward_op is None:
        yield f"{op.name}: has a backward", False, "register one: @op.backward(saves=..., gives=...)"
    elif trained:
        yield f"{op.name}: gradients are those of its values", _gradcheck(op, detached, trained), ""
    yield from _providers(op, detached)


def _registration(op: Op, args: tuple) -> Answer:
    """Whether the schema, and the shape rule on fake tensors, agree with a real call (`torch.library.opcheck`)."""
    found = torch.library.opcheck(
        op.overload, args, test_utils=("test_schema", "test_faketensor"), raise_exception=False
    )
    failed = [
        f"{name}: {str(error).strip().splitlines()[0][:200]}" for name, error in found.items() if error != "SUCCESS"
    ]
    return f"{op.name}: schema, and shapes without numbers", not failed, "; ".join(failed)


def _gradcheck(op: Op, args: tuple, trained: Sequence[int]) -> bool:
    """Whether the gradients of some arguments, by position, are those of finite differences."""

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        given = list(args)
        for i, leaf in zip(trained, leaves):
            given[i] = leaf
        return tuple(v for v in tree_leaves(op(*given)) if isinstance(v, Tensor) and v.requires_grad)

    leaves = [args[i].clone().requires_grad_() for i in trained]
    return torch.autograd.gradcheck(call, leaves, raise_exception=False)


def _providers(op: Op, args: tuple) -> Iterator[Answer]:
    """Whether each provider that runs here is as exact as the reference."""
    for provider in op.providers:
        asked = f"{op.name} by {provider.name}: as exact as the reference"
        if (reason := provider.refuses(*args)) is not None:
            yield asked, True, f"not run here: {reason}"
            continue
        with torch.no_grad():
            made, plain = (
                [v for v in tree_leaves(run(*args)) if isinstance(v, Tensor)] for run in (provider.run, op.reference)
            )
        yield asked, *as_exact(made, plain, plain, plain[0].dtype)
