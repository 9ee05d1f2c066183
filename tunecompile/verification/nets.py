"""The nets that a pass goes through: its graphs, its ops alone, and a training step of a small model.

Of graphs there are an example's own, other spellings of it, and near misses; of an op its schema, shape rule, gradients
and providers. The model's layers compute the example.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves, tree_map

from tunecompile import passes as own_passes
from tunecompile._torch.dynamo import reset
from tunecompile._torch.fake_tensors import copied
from tunecompile.compiler.pass_manager import Context, Pass, run_stage
from tunecompile.compiler.plugins import pipeline
from tunecompile.ir.canonicalize import canonicalize
from tunecompile.ir.op import OPS, Op
from tunecompile.ir.rewrite import annotate
from tunecompile.runtime.attach import attach
from tunecompile.runtime.model_state import Settings, state_of
from tunecompile.verification.pass_examples import Answer, Example, as_exact, gradients, in_fp64
from tunecompile.verification.verify import verify

Variants = Callable[[GraphModule], Iterator[tuple[str, GraphModule]]]  #: a graph -> (what was changed, a changed copy)


def rewritten(passes: Sequence[Pass], gm: GraphModule) -> tuple[GraphModule, Context]:
    """A canonical copy of a graph after the recognize passes, and their reports."""
    work, context = copied(gm), Context("example")
    canonicalize(work)
    run_stage(passes, "recognize", work.graph, context)
    work.graph.lint()
    work.recompile()
    return work, context


def through(function: Callable, change: Callable[[GraphModule], Callable]) -> Callable:
    """Compile a function with `change` as the backend: it gets Dynamo's graph, and returns what runs in its place."""
    reset()
    return torch.compile(function, backend=lambda gm, _: change(gm), fullgraph=True, dynamic=False)


def captured(function: Callable, args: Sequence[Any]) -> tuple[GraphModule, list[Any]]:
    """The graph that Dynamo makes of a call, and the graph's inputs."""
    seen: list[tuple[GraphModule, list[Any]]] = []

    def keep(gm: GraphModule) -> Callable:
        def run(*inputs: Any) -> Any:
            seen.append((gm, list(inputs)))
            return gm(*inputs)

        return run

    through(function, keep)(*args)
    return seen[0]


def pass_on_graphs(passes: Sequence[Pass], example: Example) -> Iterator[Answer]:
    """Whether the example is found, right, and left alone the second time, in every dtype."""
    for dtype in example.dtypes:
        yield from _in_dtype(passes, example, dtype)


def _in_dtype(passes: Sequence[Pass], example: Example, dtype: torch.dtype) -> Iterator[Answer]:
    """The same in one dtype."""
    seen: list[tuple[GraphModule, Context]] = []

    def change(gm: GraphModule) -> GraphModule:
        seen.append(rewritten(passes, gm))
        return seen[-1][0]

    name, args = str(dtype).removeprefix("torch."), example.args(dtype)
    plain, exact = gradients(example.function, args), gradients(example.function, in_fp64(args))
    made = gradients(through(example.function, change), args)
    work, context = seen[-1]
    refused = [reason for tally in context.tallies for reason in tally.refused]
    yield f"found in {name}", bool(_own_ops(work)), "; ".join(refused) or f"{_own_ops(work).total()} ops"
    yield f"right in {name}", *as_exact(made, plain, exact, dtype)
    second, _ = rewritten(passes, work)
    yield f"left alone the second time, in {name}", str(second.graph) == str(work.graph), ""


def _own_ops(gm: GraphModule) -> Counter[str]:
    """How many ops of each name a graph has."""
    return Counter(OPS[node.target].name for node in gm.graph.nodes if node.target in OPS)


def spellings(passes: Sequence[Pass], example: Example) -> Iterator[Answer]:
    """Whether graphs that compute the same in another spelling are found, too."""
    count, found, wrong = _varied(passes, example, respelled)
    lost = [variant for variant, ops in found.items() if not ops]
    yield f"{count} other spellings are found", not lost, "; ".join(lost[:3])
    yield f"{count} other spellings are right", not wrong, "; ".join(wrong[:3])


def near_misses(passes: Sequence[Pass], example: Example) -> Iterator[Answer]:
    """Whether graphs that differ from the example's in one place keep their results, rewritten or not."""
    count, found, wrong = _varied(passes, example, spoilt)
    yield (
        f"{count} graphs that are nearly this one stay right",
        not wrong,
        "; ".join(wrong[:3]) or f"{sum(map(bool, found.values()))} of them still have the op, and may",
    )


def _varied(passes: Sequence[Pass], example: Example, variants: Variants) -> tuple[int, dict[str, int], list[str]]:
    """Put variants of an example's graph through the passes.

    Returns:
        How many there are, how many ops each has afterwards, and those whose results changed.
    """
    gm, inputs = captured(example.function, example.args(torch.float32))
    found: dict[str, int] = {}
    wrong: list[str] = []
    for change, variant in variants(gm):
        made = rewritten(passes, variant)[0]
        found[change] = _own_ops(made).total()
        plain = gradients(variant, inputs)
        right, detail = as_exact(gradients(made, inputs), plain, plain, torch.float32)
        wrong += [] if right else [f"{change}: {detail}"]
    return len(found), found, wrong


def respelled(gm: GraphModule) -> Iterator[tuple[str, GraphModule]]:
    """Copies that compute the same: swapped operands of sums and products, and casts of values to their own dtype."""
    for i, node in enumerate(gm.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        if node.target in (operator.add, operator.mul, torch.add, torch.mul) and len(node.args) == 2:
            yield f"operands of {node.name} swapped", _changed(gm, i, lambda n: _swap(n, 0, 1))
        if isinstance(value := node.meta.get("example_value"), Tensor) and value.is_floating_point():
            yield (
                f"{node.name} cast to its own dtype",
                _changed(gm, i, lambda n: _through(n, "to", n.meta["example_value"].dtype)),
            )


def spoilt(gm: GraphModule) -> Iterator[tuple[str, GraphModule]]:
    """Copies with one change each.

    The change is another order of operands, another constant, a negated or rolled value, or another user of an inner
    value.
    """
    for i, node in enumerate(gm.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        tensors = [(j, arg) for j, arg in enumerate(node.args) if isinstance(arg, Node)]
        if len(tensors) == 2 and _alike(tensors[0][1], tensors[1][1]):
            places = tensors[0][0], tensors[1][0]
            yield f"operands of {node.name} swapped", _changed(gm, i, lambda n, places=places: _swap(n, *places))
        for j, arg in enumerate(node.args):
            if isinstance(arg, float):
                yield (
                    f"{arg} of {node.name} is {1.5 * arg + 0.25}",
                    _changed(gm, i, lambda n, j=j, arg=arg: n.update_arg(j, 1.5 * arg + 0.25)),
                )
        if isinstance(value := node.meta.get("example_value"), Tensor) and value.is_floating_point():
            yield f"{node.name} negated", _changed(gm, i, lambda n: _through(n, operator.neg))
            if value.dim():
                yield f"{node.name} rolled", _changed(gm, i, lambda n: _through(n, torch.roll, 1, -1))
            yield f"{node.name} has another user", _changed(gm, i, _returned)


def _alike(a: Node, b: Node) -> bool:
    """Whether two values differ, and have the same shape."""
    shapes = [getattr(node.meta.get("example_value"), "shape", None) for node in (a, b)]
    return a is not b and shapes[0] is not None and shapes[0] == shapes[1]


def _changed(gm: GraphModule, place: int, change: Callable[[Node], Any]) -> GraphModule:
    """A copy of a graph with one node changed."""
    other = copied(gm)
    change(list(other.graph.nodes)[place])
    other.graph.lint()
    other.recompile()
    return other


def _swap(node: Node, i: int, j: int) -> None:
    """Swap two arguments of a call."""
    a, b = node.args[i], node.args[j]
    node.update_arg(i, b)
    node.update_arg(j, a)


def _through(node: Node, call: Callable | str, *rest: Any) -> None:
    """Put a call between a value and all its users."""
    with node.graph.inserting_after(node):
        made = node.graph.create_node("call_method" if isinstance(call, str) else "call_function", call, (node, *rest))
    annotate(made, node)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _returned(node: Node) -> None:
    """Add a value's sum to the graph's last result, since Dynamo's caller expects as many results as there were."""
    output = node.graph.output_node()
    results = output.args[0]
    assert isinstance(results, (list, tuple))
    *others, last = results
    with node.graph.inserting_before(output):
        share = node.graph.call_method("sum", (node,))
        total = node.graph.call_function(operator.add, (last, share))
    annotate(share, node)
    annotate(total, node)
    output.args = ((*others, total),)


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


class _Layer(nn.Module):
    """A layer that computes an example, with the example's tensors as its weights."""

    def __init__(self, example: Example):
        super().__init__()
        args = example.args(torch.float32)
        self.function = example.function
        self.given = [None if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
        weights = [arg for arg, given in zip(args, self.given) if given is None]
        self.weights = nn.ParameterList([nn.Parameter(arg.detach().clone(), arg.requires_grad) for arg in weights])

    def forward(self, x: Tensor) -> Tensor:
        """The input plus the means of the example's results on scaled weights."""
        weights = iter(self.weights)
        made = self.function(*[next(weights) * x if given is None else given for given in self.given])
        return x + sum(
            value.float().mean()
            for value in tree_leaves(made)
            if isinstance(value, Tensor) and value.is_floating_point()
        )


class _Model(nn.Module):
    """Two such layers and a loss."""

    def __init__(self, example: Example):
        super().__init__()
        self.layers = nn.ModuleList(_Layer(example) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """The loss, a scalar."""
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def training_step(passes: Sequence[Pass], example: Example) -> Iterator[Answer]:
    """Whether the example is found in a model of two layers, and one training step of it passes `verify`."""
    own = {p.name for p in passes}
    others = (p for p in pipeline(own_passes.PIPELINE) if p.name not in own)
    model = attach(_Model(example).train(), Settings((*passes, *others), executor="eager"))
    state = state_of(model)
    result = verify(model, {"x": torch.ones(1, device="cpu")}, loss=lambda model, batch: model(**batch))
    found = {tally.family: tally.rewritten for tally in state.matches()}
    if not result.faults:  # a pass at fault is switched off by now
        yield (
            "found in a model's layers",
            any(found.get(p.name) for p in passes),
            ", ".join(f"{name} {count}" for name, count in found.items() if count),
        )
    yield "a training step is verified", result.passed, result.summary()
