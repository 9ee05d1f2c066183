"""A rewrite: a plain PyTorch function says what to look for, another what to put there.

    @rewrite("silu_gate", to=lambda gate, up: gated_activation(gate, up, "silu"))
    def _(gate, up):
        return F.silu(gate) * up

The pattern is traced by `torch.fx`, as the model is by Dynamo, and both pass through `tunecompile.ir.canonicalize`: `x.float()` and `x.to(torch.float32)`
are one thing, `a * b` and `b * a` as well. Its parameters capture what stands there, tensors, numbers, dtypes and None alike; what is written in it
(`mean(-1, keepdim=True)`, a 2) has to stand there. `tunecompile.ir.match.cast` marks a cast that may be absent. A pattern of several outputs returns
a tuple, and is found from the first.

A match is left alone, with the reason in the report, where `where` says so; where somebody else reads an inner value; where a mutation, or a change of
grad or autocast mode, comes in between; and where the replacement would have another shape or dtype.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from tunecompile._torch.fake_tensors import enable_python_dispatcher, fake_mode_of
from tunecompile.errors import InvalidRewrite
from tunecompile.ir.canonicalize import is_mutation, value
from tunecompile.ir.match import Match, Matcher, Pattern

__all__ = ["Rewrite", "annotate", "apply", "erase_dead", "replace", "rewrite", "where_from"]


@dataclass(frozen=True)
class Rewrite:
    """What to look for, and what to put there. Made by `rewrite`."""

    name: str  #: as reports and verification call it
    pattern: Pattern  #: what to look for
    to: Callable[..., Any]  #: builds the replacement of what the pattern binds
    where: Callable[[Match], str | None]  #: None if a match holds, else the reason why it does not


def rewrite(
    name: str, to: Callable[..., Any], where: Callable[[Match], str | None] | None = None
) -> Callable[[Callable], Rewrite]:
    """Make a `Rewrite` of a pattern function.

    Args:
        name: as reports and verification call it.
        to: takes parameters of the pattern by name (or `match`, the whole match), and returns what the pattern returns: one value, or a tuple.
            Inside, tensors are symbolic values of the graph under rewriting: use ops, operators and torch functions as usual.
        where: of a match: None if it holds, else the reason why it does not, for the report. Shapes and dtypes are those of
            `tunecompile.ir.canonicalize.value`. One that raises costs this match alone. None: all hold.

    Returns:
        A decorator that makes a `Rewrite` of a plain function.

    Raises:
        InvalidRewrite: `to` takes what the pattern does not bind.
    """

    def make(fn: Callable) -> Rewrite:
        pattern = Pattern.trace(fn)
        unknown = set(inspect.signature(to).parameters) - set(pattern.parameters) - {"match"}
        if unknown:
            raise InvalidRewrite(name=name, reason=f"`to` takes {sorted(unknown)}, which the pattern does not bind")
        return Rewrite(name, pattern, to, where or (lambda match: None))

    return make


def apply(rewrite: Rewrite, graph: Graph) -> tuple[list[str], list[str]]:
    """Rewrite every match in place.

    What a replacement is made of is not matched again: one call applies a rewrite once to each place.

    Args:
        rewrite: to apply.
        graph: of the recognize stage, canonical.

    Returns:
        (places, reasons): "name at file:line" of each that was rewritten, and why others were refused.
    """
    matcher, made, reasons, places = Matcher(graph), set(), {}, []
    nodes = set(graph.nodes)
    for anchor in matcher.anchors(rewrite.pattern):
        if anchor not in nodes:  # an earlier match took it
            continue
        for match in matcher.at(rewrite.pattern, anchor):
            if made & set(match.nodes.values()):
                continue
            reason = _judge(rewrite, match) or replace(graph, match.outputs, rewrite.to, _bound(rewrite, match))
            if reason is None:
                erase_dead(graph, match.nodes.values())
                before, nodes, matcher = nodes, set(graph.nodes), Matcher(graph)
                made |= nodes - before
                reasons.pop(anchor, None)
                places.append(f"{rewrite.name}{where_from(anchor)}")
                break
            reasons.setdefault(anchor, f"{rewrite.name}: {reason}{where_from(anchor)}")
    return places, list(reasons.values())


def _judge(rewrite: Rewrite, match: Match) -> str | None:
    """Why the match does not hold, or None."""
    try:
        return rewrite.where(match) or _used_early(match) or _changed_later(match)
    except Exception as error:  # a guard that did not think of this graph costs one match, not the region
        return f"its guard failed ({type(error).__name__}: {error})"


def _bound(rewrite: Rewrite, match: Match) -> dict[str, Any]:
    wanted = inspect.signature(rewrite.to).parameters
    return {name: match if name == "match" else match.bound[name] for name in wanted}


def replace(graph: Graph, outputs: tuple[Node, ...], build: Callable[..., Any], bound: dict[str, Any]) -> str | None:
    """Build new nodes just before the last of `outputs`, and let them take its users' place; the old nodes die unused.

    Args:
        graph: of the recognize stage.
        outputs: nodes whose values are replaced.
        build: called with `bound` by name, nodes as symbolic values; returns as many values as there are outputs.
        bound: nodes and constants.

    Returns:
        None; or, with nothing changed, the reason: the new values have another shape or dtype than the old ones.
    """
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)

    def lift(item: Any) -> Any:
        return torch.fx.Proxy(item, tracer) if isinstance(item, Node) else item

    last = max(outputs, key={node: i for i, node in enumerate(graph.nodes)}.__getitem__)
    before = set(graph.nodes)
    with graph.inserting_before(last):  # every input exists there; users of earlier outputs stand below
        built = build(**{name: lift(item) for name, item in bound.items()})
    news = [item.node for item in (built if isinstance(built, (tuple, list)) else (built,))]
    made = [node for node in graph.nodes if node not in before]
    for node in made:
        annotate(node, last)
    for old, new in zip(outputs, news):
        if (difference := _difference(value(old), value(new))) is not None:
            for node in reversed(made):
                graph.erase_node(node)
            return difference
    for old, new in zip(outputs, news):
        old.replace_all_uses_with(new)
    return None


def _difference(old: Any, new: Any) -> str | None:
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return None
    if (old.dtype, tuple(old.shape)) == (new.dtype, tuple(new.shape)):
        return None
    return f"the replacement is {new.dtype} {tuple(new.shape)}, the original {old.dtype} {tuple(old.shape)}"


def annotate(node: Node, origin: Node) -> None:
    """Give a new node its fake value (`meta["example_value"]`), which later guards read, and the source line of the node it replaces.

    Args:
        node: new, of the recognize stage, whose arguments have fake values.
        origin: a node that it replaces.
    """
    for key in ("stack_trace", "nn_module_stack"):
        if key in origin.meta:
            node.meta.setdefault(key, origin.meta[key])
    if "example_value" in node.meta:
        return
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
    mode = fake_mode_of((args, kwargs))
    with (
        mode if mode is not None else contextlib.nullcontext(),
        enable_python_dispatcher(),
    ):  # symbolic sizes need the latter
        call = getattr(args[0], node.target) if node.op == "call_method" else node.target
        node.meta["example_value"] = call(*(args[1:] if node.op == "call_method" else args), **kwargs)


def erase_dead(graph: Graph, candidates: Iterable[Node]) -> None:
    """Erase nodes that nobody uses. (fx's own dead code elimination would drop in-place methods too.)

    Args:
        graph: that they belong to.
        candidates: nodes, of which those without users are erased, until none is left.
    """
    pending = set(candidates)
    while dead := [node for node in pending if not node.users]:
        for node in dead:
            graph.erase_node(node)
            pending.discard(node)


def _used_early(match: Match) -> str | None:
    """Several outputs become one op, which stands where the last of them stood."""
    nodes = list(match.outputs[0].graph.nodes) if len(match.outputs) > 1 else []
    last = max((nodes.index(node) for node in match.outputs), default=-1) if nodes else -1
    early = (
        any(
            nodes.index(user) < last and user not in match.nodes.values() for out in match.outputs for user in out.users
        )
        if nodes
        else False
    )
    return "an output is used before all of them are computed" if early else None


def _changed_later(match: Match) -> str | None:
    """An op saves its inputs for its backward. The model may save other values, and be free to change these."""
    inputs = [bound for bound in match.bound.values() if isinstance(bound, Node)]
    changed = any(
        is_mutation(user) and user.args[0] is node and user > match.outputs[0]
        for node in inputs
        for user in node.users
        if user.args
    )
    return "an input is changed in place afterwards" if changed else None


def where_from(node: Node) -> str:
    """The line of the user's code that made a node.

    Args:
        node: any.

    Returns:
        " at file:line", or "" where nobody knows.
    """
    line, _ = user_line(node)
    return f" at {line}" if line else ""


def user_line(node: Node) -> tuple[str, str]:
    """('file:line', what stands there) of the user's code that made the node, or empty."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    last = max((i for i, line in enumerate(lines) if line.startswith("File ")), default=None)
    if last is None:
        return "", ""
    file, _, rest = lines[last].removeprefix("File ").partition(", line ")
    return f"{file.strip(chr(34)).rsplit('/', 1)[-1]}:{rest.split(',')[0]}", "".join(lines[last + 1 : last + 2])
