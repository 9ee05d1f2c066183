"""Rewrites: a plain PyTorch function is the pattern to look for, another one builds the replacement.

    @rewrite("silu_gate", to=lambda gate, up: gated_activation(gate, up, "silu"))
    def _(gate, up):
        return F.silu(gate) * up

The pattern is traced by `torch.fx`, the model by Dynamo, and both pass through `tunecompile.ir.canonicalize`. So
`x.float()` matches `x.to(torch.float32)`, and `a * b` matches `b * a`. A pattern's parameters capture any value:
tensors, numbers, dtypes and None. Constants in the pattern (`mean(-1, keepdim=True)`, a 2) match only themselves.
`tunecompile.ir.match.cast` marks an optional cast. A pattern with several outputs returns a tuple, and is looked for
from the first of them.

A match is not rewritten, and the report shows the reason, in five cases: an input is a tensor subclass; `where` refuses
it; an inner value has another user; a mutation, or a change of grad or autocast mode, lies inside it; or what replaces
it has another shape or dtype.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from tunecompile._torch.fake_tensors import enable_python_dispatcher, fake_mode_of, wraps_tensors
from tunecompile.errors import InvalidRewrite
from tunecompile.ir.canonicalize import value
from tunecompile.ir.match import Match, Matcher, Pattern
from tunecompile.ir.nodes import is_mutation

__all__ = ["Rewrite", "annotate", "apply", "build_before", "erase_dead", "replace", "rewrite", "where_from"]


@dataclass(frozen=True)
class Rewrite:
    """A pattern and its replacement. Made by `rewrite`."""

    name: str  #: shown in reports and by verification
    pattern: Pattern  #: the subgraph to look for
    to: Callable[..., Any]  #: builds the replacement from the values that the pattern binds
    where: Callable[[Match], str | None]  #: the reason why a match must not be rewritten, or None


def rewrite(
    name: str, to: Callable[..., Any], where: Callable[[Match], str | None] | None = None
) -> Callable[[Callable], Rewrite]:
    """Make a `Rewrite` of a pattern function.

    Args:
        name: shown in reports and by verification.
        to: builds the replacement. It takes parameters of the pattern by name (or `match`, the whole match), and
            returns as many values as the pattern. Inside, tensors are symbolic values of the graph: use ops,
            operators and torch functions as usual.
        where: a guard: returns the reason why a match must not be rewritten, for the report, or None. Shapes and
            dtypes are those of `tunecompile.ir.canonicalize.value`. If it raises, only this match is refused. None
            accepts all.

    Returns:
        A decorator that makes a `Rewrite` of a plain function.

    Raises:
        InvalidRewrite: `to` has a parameter that the pattern does not bind.
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

    Nodes of a replacement are not matched again: one call applies a rewrite once to each place.

    Args:
        rewrite: to apply.
        graph: of the recognize stage, canonical.

    Returns:
        (places, reasons): "name at file:line" of each match that was rewritten, and why others were refused.
    """
    places, refused = attempt(rewrite, graph)
    return places, [reason for reason, _ in refused]


def attempt(rewrite: Rewrite, graph: Graph) -> tuple[list[str], list[tuple[str, Match]]]:
    """Do as `apply`, and return the matches that were refused with the reasons: another rewrite may take them."""
    matcher, made, refused, places = Matcher(graph), set(), {}, []
    nodes = set(graph.nodes)
    for anchor in matcher.anchors(rewrite.pattern):  # in order: earlier matches replaced nothing behind their anchors
        for match in matcher.at(rewrite.pattern, anchor):
            if made & set(match.nodes.values()):
                continue
            reason = _judge(rewrite, match) or replace(graph, match.outputs, rewrite.to, _bound(rewrite, match))
            if reason is None:
                erase_dead(graph, match.nodes.values())
                before, nodes, matcher = nodes, set(graph.nodes), Matcher(graph)
                made |= nodes - before
                refused.pop(anchor, None)
                places.append(f"{rewrite.name}{where_from(anchor)}")
                break
            refused.setdefault(anchor, (f"{rewrite.name}: {reason}{where_from(anchor)}", match))
    return places, list(refused.values())


def _judge(rewrite: Rewrite, match: Match) -> str | None:
    """Why the match must not be rewritten, or None."""
    try:
        return _of_another_kind(match) or rewrite.where(match) or _used_early(match) or _changed_later(match)
    except Exception as error:  # an error in a guard refuses one match, not the region
        return f"its guard failed ({type(error).__name__}: {error})"


def _bound(rewrite: Rewrite, match: Match) -> dict[str, Any]:
    wanted = inspect.signature(rewrite.to).parameters
    return {name: match if name == "match" else match.bound[name] for name in wanted}


def replace(graph: Graph, outputs: tuple[Node, ...], build: Callable[..., Any], bound: dict[str, Any]) -> str | None:
    """Build new nodes just before the last of `outputs`, and redirect the users of `outputs` to them.

    The old nodes stay in the graph; `erase_dead` removes them.

    Args:
        graph: of the recognize stage.
        outputs: nodes whose values are replaced.
        build: is called with `bound` by name, nodes as symbolic values; returns as many values as there are outputs.
        bound: nodes, constants, and lists of both, by name.

    Returns:
        None; or, with the graph unchanged, the reason: the new values have another shape or dtype than the old ones.
    """
    last = max(outputs, key={node: i for i, node in enumerate(graph.nodes)}.__getitem__)
    made, news = build_before(graph, last, last, build, bound)  # all inputs exist there, and users come later
    for old, new in zip(outputs, news):
        if (difference := _difference(value(old), value(new))) is not None:
            for node in reversed(made):
                graph.erase_node(node)
            return difference
    for old, new in zip(outputs, news):
        old.replace_all_uses_with(new)
    return None


def build_before(
    graph: Graph, place: Node, origin: Node, build: Callable[..., Any], bound: dict[str, Any]
) -> tuple[list[Node], list[Node]]:
    """Build new nodes before `place`.

    Args:
        graph: of the recognize stage.
        place: a node before which all of `bound` exist.
        origin: a node whose source line the new ones have.
        build: is called with `bound` by name, nodes as symbolic values; returns one value or several.
        bound: nodes, constants, and lists of both, by name.

    Returns:
        (all new nodes, those of what was returned).
    """
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)

    def proxy(node: Node) -> Any:
        return torch.fx.Proxy(node, tracer)

    before = set(graph.nodes)
    with graph.inserting_before(place):
        built = build(**{name: torch.fx.map_arg(item, proxy) for name, item in bound.items()})
    made = [node for node in graph.nodes if node not in before]
    for node in made:
        annotate(node, origin)
    return made, [item.node for item in (built if isinstance(built, (tuple, list)) else (built,))]


def _difference(old: Any, new: Any) -> str | None:
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return None
    if (old.dtype, tuple(old.shape)) == (new.dtype, tuple(new.shape)):
        return None
    return f"the replacement is {new.dtype} {tuple(new.shape)}, the original {old.dtype} {tuple(old.shape)}"


def annotate(node: Node, origin: Node) -> None:
    """Give a new node its fake value (`meta["example_value"]`), which guards read, and its origin's source line.

    Args:
        node: a new node of the recognize stage, with arguments that have fake values.
        origin: a node that it replaces.
    """
    for key in ("stack_trace", "nn_module_stack"):
        if key in origin.meta:
            node.meta.setdefault(key, origin.meta[key])
    if "example_value" in node.meta:
        return
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
    mode = fake_mode_of((args, kwargs))
    with mode if mode is not None else contextlib.nullcontext(), enable_python_dispatcher():  # for symbolic sizes
        call: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        node.meta["example_value"] = call(*(args[1:] if node.op == "call_method" else args), **kwargs)


def erase_dead(graph: Graph, candidates: Iterable[Node]) -> None:
    """Erase nodes without users. (fx's own dead code elimination would remove in-place methods, too.)

    Args:
        graph: the nodes' graph.
        candidates: those without users are erased, repeatedly, until none is left.
    """
    pending = set(candidates)
    while dead := [node for node in pending if not node.users]:
        for node in dead:
            graph.erase_node(node)
            pending.discard(node)


def _of_another_kind(match: Match) -> str | None:
    """Refuse a match of tensors that are subclasses (torchao's weights, say), which know torch's operations alone."""
    values = (value(bound) for bound in match.bound.values() if isinstance(bound, Node))
    kinds = (type(each).__name__ for each in values if wraps_tensors(each))
    return next((f"an input is a {kind}, which knows torch's own operations alone" for kind in kinds), None)


def _used_early(match: Match) -> str | None:
    """Refuse a match whose outputs are used too early: one op computes all of them, in the place of the last."""
    first, *others = match.outputs
    if not others:
        return None
    place = {node: i for i, node in enumerate(first.graph.nodes)}
    last, inside = max(place[node] for node in match.outputs), set(match.nodes.values())
    early = any(place[user] < last and user not in inside for out in match.outputs for user in out.users)
    return "an output is used before all of them are computed" if early else None


def _changed_later(match: Match) -> str | None:
    """Refuse a match where an input is mutated afterwards: an op saves its inputs, the model's own code might not."""
    inputs = [bound for bound in match.bound.values() if isinstance(bound, Node)]
    changed = any(
        is_mutation(user) and user.args[0] is node and user > match.outputs[0]
        for node in inputs
        for user in node.users
        if user.args
    )
    return "an input is changed in place afterwards" if changed else None


def where_from(node: Node) -> str:
    """Return the line of the user's code that made a node, as " at file:line"; "" where it is unknown."""
    line, _ = user_line(node)
    return f" at {line}" if line else ""


def user_line(node: Node) -> tuple[str, str]:
    """Return ("file:line", the line's text) of the user's code that made a node; empty where they are unknown."""
    path, number, text = user_frame(node)
    return (f"{path.rsplit('/', 1)[-1]}:{number}", text) if path else ("", "")


_FUNCTIONAL = "/torch/nn/functional.py"


def user_frame(node: Node) -> tuple[str, str, str]:
    """Return (path, number, text) of the line of the user's code that made a node; empty where they are unknown.

    Functions of `torch.nn.functional` into which Dynamo looked are not the user's.
    """
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    frames = [i for i, line in enumerate(lines) if line.startswith("File ")]
    last = max((i for i in frames if _FUNCTIONAL not in lines[i].replace(chr(92), "/")), default=None)
    if last is None:
        return "", "", ""
    file, _, rest = lines[last].removeprefix("File ").partition(", line ")
    return file.strip(chr(34)).replace(chr(92), "/"), rest.split(",")[0], "".join(lines[last + 1 : last + 2])
