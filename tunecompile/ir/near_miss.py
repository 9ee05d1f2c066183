"""Near misses: where the best attempt to match an op family's patterns failed, and on which values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node
from torch.fx.node import map_aggregate

from tunecompile.ir.canonicalize import name_of
from tunecompile.ir.match import Matcher, Miss, Pattern, cast
from tunecompile.ir.rewrite import where_from


def near_misses(patterns: Sequence[Pattern], anchors: Sequence[Node]) -> dict[Node, str]:
    """Return why each anchor is part of no pattern. Anchors that do match, and that a guard refused, are left out.

    Args:
        patterns: of one op family, the widest first.
        anchors: nodes of one graph, at least one, that suggest the family.
    """
    matcher = Matcher(anchors[0].graph)
    return {anchor: reason for anchor in anchors if (reason := _near_miss(matcher, patterns, anchor)) is not None}


def _near_miss(matcher: Matcher, patterns: Sequence[Pattern], anchor: Node) -> str | None:
    missed: list[Miss] = []
    reasons: list[str] = []
    calling = [pattern for pattern in patterns if pattern.calls(anchor)]
    for pattern in calling or patterns:  # without such an operation, a pattern is matched at the anchor's users
        for match in matcher.around(pattern, anchor, missed):
            if (flaw := matcher.flaw(match)) is None:
                return None
            fault, node = flaw
            reasons.append(f"`{name_of(node.target)}` {fault}{where_from(node)}")
    # of equal ones the first, since patterns come widest first
    best = max(missed, key=lambda miss: (miss.share, miss.is_news, miss.found is anchor), default=None)
    reason = reasons[0] if reasons else "part of no known pattern" if best is None else _describe(best)
    return f"`{name_of(anchor.target)}`{where_from(anchor)}: {reason}"


def _describe(miss: Miss) -> str:
    expected, found = miss.expected, miss.found
    if isinstance(expected, Node) and expected in miss.bound:
        return f"expected {_shown(miss.bound[expected])} once more, found {_shown(found)}{_line(miss)}"
    if not (_is_call(expected) and _is_call(found)):  # for a constant or an input, show the call that reads it
        expected, found = _owner(miss) or (expected, found)
    return f"expected {_shown(expected)}, found {_shown(found)}{_line(miss)}"


def _line(miss: Miss) -> str:
    """The user's line of the value that was found, or of the call that reads it."""
    if _is_call(miss.found):
        return where_from(miss.found)
    owner = _owner(miss)
    return where_from(owner[1]) if owner else ""


def _owner(miss: Miss) -> tuple[Node, Node] | None:
    """The calls, one of the pattern and one of the graph, among whose arguments the attempt failed."""
    calls = [
        (node, found) for node, found in miss.bound.items() if node.op != "placeholder" and node.target is not cast
    ]
    return next(
        ((node, found) for node, found in reversed(calls) if _has(node, miss.expected) and _has(found, miss.found)),
        None,
    )


def _has(node: Node, item: Any) -> bool:
    """Whether `item` is one of the node's arguments, at any depth."""
    leaves: list[Any] = []
    map_aggregate((node.args, node.kwargs), lambda leaf: leaves.append(_uncast(leaf)))
    return item in leaves


def _uncast(item: Any) -> Any:
    """The operand of an optional cast of a pattern; any other item unchanged."""
    while isinstance(item, Node) and item.target is cast:
        item = item.args[0]
    return item


def _is_call(item: Any) -> bool:
    return isinstance(item, Node) and item.op.startswith("call")


def _shown(item: Any) -> str:
    """A call with its arguments, as text; arguments that are calls are only named."""
    item = _uncast(item)
    if not _is_call(item):
        return _argument(item)
    arguments = [*map(_argument, item.args), *(f"{name}={_argument(given)}" for name, given in item.kwargs.items())]
    return f"{name_of(item.target)}({', '.join(arguments)})"


def _argument(item: Any) -> str:
    item = _uncast(item)
    if isinstance(item, (tuple, list)):
        return f"({', '.join(map(_argument, item))}{',' * (len(item) == 1)})"
    if _is_call(item):
        return f"{name_of(item.target)}(...)"
    if isinstance(item, Node):
        return "the region's result" if item.op == "output" else str(item.target)
    return "..." if item is ... else repr(item)
