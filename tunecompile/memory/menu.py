"""What a region's graph offers to the planner: a few plans, each with its bytes and milliseconds.

Which values are dear is read off the joint graph, and each plan is tried on a copy of it: partitioned and lowered as it would be for
code generation, so that bytes are those of the real graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Iterator, Sequence

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.flop_counter import FlopCounterMode

from tunecompile._torch import fake_mode_of, size_hint
from tunecompile.memory.attention import repeatable
from tunecompile.memory.liveness import extent, tensor_bytes
from tunecompile.memory.planner import KEEP, RECOMPUTE, Option, Plan
from tunecompile.memory.rates import ALLOWANCE, Rates
from tunecompile.op import OPS, Cost, aten_name

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm")
Cut = Callable[[Plan], tuple[GraphModule, GraphModule]]  #: a plan -> the lowered forward and backward graph


@dataclass(frozen=True)
class Row:
    """One plan of one region at the sizes of one batch: bytes a layer returns from its forward (what it saves and hands on), those of its largest
    tensor if no other comes near, bytes its forward and backward need beside, and floating point operations of both."""

    plan: Plan
    returned: int
    largest: int
    forward: int
    backward: int
    forward_flops: int
    backward_flops: int


def cost(node: Node) -> Cost | None:
    """Of an op, or of an ATen call; None where the partitioner knows best."""
    if node.target in OPS:
        return OPS[node.target].cost
    name = aten_name(node.target)
    return Cost.MATMUL if name in _PRODUCTS or (_is_attention(node) and "backward" not in name) else None


def random(node: Node) -> bool:
    """Whether its numbers would have to be drawn again from the same state."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def backward_nodes(graph: Graph) -> set[Node]:
    """Everything that depends on a tangent."""
    reached: set[Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if tangent or any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def dear_nodes(graph: Graph) -> list[Node]:
    """The products and attentions of the forward pass, by whose place in this list a `Plan` calls them."""
    backward = backward_nodes(graph)
    return [node for node in graph.nodes if node.op == "call_function" and node not in backward and cost(node) is Cost.MATMUL and not random(node)]


def name(node: Node) -> str:
    """Of a dear call, for people: what it is and the shape of what it returns."""
    value = node.meta["val"]
    largest = max((v for v in value if isinstance(v, torch.Tensor)), key=tensor_bytes) if isinstance(value, (tuple, list)) else value
    called = OPS[node.target].name if node.target in OPS else aten_name(node.target)
    return f"{called.strip('_')} {'x'.join(str(size_hint(size)) for size in largest.shape)}"


def flops(node: Node) -> int:
    """Floating point operations of a dear call, at the hinted sizes; 0 where nobody counts them."""
    args, kwargs = torch.fx.map_arg((list(node.args), dict(node.kwargs)), lambda n: n.meta["val"])
    if (op := OPS.get(node.target)) is not None and op.flops is not None:
        return size_hint(op.flops(*args, **kwargs))
    if _is_attention(node):
        return _attention_flops(node, [value for value in args if isinstance(value, torch.Tensor)])
    run = node.target if op is None else op.reference
    with fake_mode_of((args, kwargs)) or torch.no_grad(), FlopCounterMode(display=False) as counter:
        run(*args, **kwargs)
    return size_hint(counter.get_total_flops())


def _is_attention(node: Node) -> bool:
    return "attention" in aten_name(node.target)


def _attention_flops(node: Node, tensors: Sequence[torch.Tensor]) -> int:
    """Both products, and five for two in the backward, as if nothing were masked. (torch's counter refuses fewer heads of k than of q.)"""
    backward = "backward" in aten_name(node.target)
    q, k = tensors[backward:backward + 2]  # the backward's first is the gradient
    return int((10 if backward else 4) * size_hint(q.numel()) * size_hint(k.shape[-2] if k.dim() == 4 else k.shape[0]))


def courses(graph: Graph) -> Iterator[list[Plan]]:
    """What to survey, one course after another until something fits: all that is kept, what is computed again, what is computed in pieces,
    and last attention, which takes longest at the lengths at which all else does not do."""
    yield [KEEP]
    yield [plan for plan in plans(graph) if plan != KEEP]
    yield from filter(None, (tiled_plans(graph, tiles) for tiles in TILES))
    if any(map(repeatable, graph.nodes)):
        yield [replace(plan, attention=True) for plan in (RECOMPUTE, *(Plan(None, tiles) for tiles in TILES if tiled_plans(graph, tiles)))]


TILES = (4, 16)  #: pieces of the tokens: they come last, since the graphs of many pieces take seconds to trace


def plans(graph: Graph) -> list[Plan]:
    """From keeping all dear values to computing everything again: the best bargains first, and the largest first, since what is left
    may wait on the host at no cost if it is small enough to be copied behind a layer's work."""
    dear = dear_nodes(graph)
    bargains = sorted(range(len(dear)), key=lambda i: _price(dear[i]))
    largest = sorted(range(len(dear)), key=lambda i: -_freed(dear[i]))
    nested = [Plan(frozenset(order[:count])) for count in range(len(dear) + 1) for order in (bargains, largest)]
    return [*dict.fromkeys(nested), RECOMPUTE]


def tiled_plans(graph: Graph, tiles: int) -> list[Plan]:
    """With what has a tiled form in so many pieces: from keeping all else that is dear to computing everything again. Empty where nothing has."""
    dear = dear_nodes(graph)
    others = [i for i, node in enumerate(dear) if not has_tiled_form(node)]
    if len(others) == len(dear):
        return []
    bargains = sorted(others, key=lambda i: _price(dear[i]))
    return [*(Plan(frozenset(bargains[:count]), tiles) for count in range(len(others) + 1)), Plan(None, tiles)]


def has_tiled_form(node: Node) -> bool:
    return node.target in OPS and OPS[node.target].tiled is not None


def _price(node: Node) -> float:
    """The lower, the more bytes computing it again frees a floating point operation."""
    return -_freed(node) / max(1, flops(node))


def _freed(node: Node) -> int:
    value = node.meta["val"]
    return sum(map(tensor_bytes, value)) if isinstance(value, (tuple, list)) else tensor_bytes(value)


def survey(cut: Cut, candidates: Sequence[Plan]) -> list[Row]:
    """A row for each plan."""
    return [_row(plan, *cut(plan)) for plan in candidates]


def _row(plan: Plan, forward: GraphModule, backward: GraphModule) -> Row:
    ahead, back = extent(forward.graph), extent(backward.graph)
    largest, next_one = (*ahead.pieces, 0, 0)[:2]
    return Row(plan, ahead.returned, largest if largest >= 2 * next_one else 0, ahead.peak - ahead.returned, back.peak, _total_flops(forward.graph), _total_flops(backward.graph))


def _total_flops(graph: Graph) -> int:
    return sum(flops(node) for node in graph.nodes if node.op == "call_function" and (cost(node) is Cost.MATMUL or _is_attention(node)))


def options(rows: Sequence[Row], scale: float, rates: Rates, offload: bool) -> tuple[Option, ...]:
    """What a layer may choose from.

    scale: tokens of this batch by tokens of the one the rows are of. offload: whether what is saved may go to the host, all of it or all but the
    largest; copies are hidden behind the layer's own work, all of it, and what is longer than that is paid for.
    """
    kept = next(row for row in rows if row.plan == KEEP)
    found = []
    for row in rows:
        held, forward, backward = (int(n * scale) for n in (row.returned, row.forward, row.backward))
        extra = (row.backward_flops - kept.backward_flops) * scale / rates.flops
        found.append(Option(row.plan, held, forward, backward, extra))
        for stays in dict.fromkeys((0, int(row.largest * scale))) if offload else ():
            copy = (held - stays) / rates.copy
            ms = extra + sum(max(0.0, copy - ALLOWANCE * work * scale / rates.flops) for work in (row.forward_flops, row.backward_flops)) + 0.02 * copy
            found.append(Option(row.plan, stays, forward, backward, ms, held - stays))
    return tuple(found)

