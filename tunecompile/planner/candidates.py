"""What a region's graph offers to the planner: a few plans, each with its bytes and milliseconds.

Which values are dear is read off the joint graph, and each plan is tried on a copy of it: partitioned and lowered as it would be for
code generation, so that bytes are those of the real graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from tunecompile._torch.fake_tensors import size_hint
from tunecompile.ir.op import OPS, Cost, aten_name
from tunecompile.planner.cost_model import Work, cost, flops, work
from tunecompile.planner.hardware import Rates
from tunecompile.planner.liveness import extent, node_bytes, tensor_bytes
from tunecompile.planner.recompute_attention import repeatable
from tunecompile.planner.solver import KEEP, RECOMPUTE, Plan, PlanOption

Cut = Callable[[Plan], tuple[GraphModule, GraphModule]]  #: a plan -> the lowered forward and backward graph


@dataclass(frozen=True)
class CandidateCost:
    """One plan of one region at the sizes of one batch: bytes a layer returns from its forward (what it saves and hands on), those of its largest
    tensor if no other comes near, bytes its forward and backward need beside, and the work of both."""

    plan: Plan
    returned: int
    largest: int
    forward: int
    backward: int
    ahead: Work
    back: Work


def random(node: Node) -> bool:
    """Whether its numbers would have to be drawn again from the same state."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def sends(node: Node) -> bool:
    """Whether ranks exchange something here (tensor parallelism). Each plans by itself, so no plan may send more than another does."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_c10d_functional"


def backward_nodes(graph: Graph) -> set[Node]:
    """Everything that depends on a tangent."""
    reached: set[Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if tangent or any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def dear_nodes(graph: Graph) -> list[Node]:
    """The products and attentions of the forward pass, by whose place in this list a `Plan` calls them. Without those that return a vector (norms of
    weights): computing them again would free next to nothing, and no plan does."""
    backward = backward_nodes(graph)
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and node not in backward
        and cost(node) is Cost.MATMUL
        and not random(node)
        and not _is_vector(node)
    ]


def _is_vector(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dim() < 2


def name(node: Node) -> str:
    """Of a dear call, for people: what it is and the shape of what it returns."""
    value = node.meta["val"]
    largest = (
        max((v for v in value if isinstance(v, torch.Tensor)), key=tensor_bytes)
        if isinstance(value, (tuple, list))
        else value
    )
    called = OPS[node.target].name if node.target in OPS else aten_name(node.target)
    return f"{called.strip('_')} {'x'.join(str(size_hint(size)) for size in largest.shape)}"


def candidate_stages(graph: Graph) -> Iterator[list[Plan]]:
    """What to survey, one course after another until something fits: all that is kept, what is computed again, what is computed in pieces,
    and last attention, which takes longest at the lengths at which all else does not do."""
    yield [KEEP]
    yield [plan for plan in plans(graph) if plan != KEEP]
    yield from filter(None, (tiled_plans(graph, tiles) for tiles in TILES))
    if any(map(repeatable, graph.nodes)):
        yield [
            replace(plan, attention=True)
            for plan in (RECOMPUTE, *(Plan(None, tiles) for tiles in TILES if tiled_plans(graph, tiles)))
        ]


TILES = (4, 16)  #: pieces of the tokens: they come last, since the graphs of many pieces take seconds to trace


def plans(graph: Graph) -> list[Plan]:
    """From keeping all dear values to computing everything again: the best bargains first, and the largest first, since what is left
    may wait on the host at no cost if it is small enough to be copied behind a layer's work."""
    dear = dear_nodes(graph)
    bargains = sorted(range(len(dear)), key=lambda i: _price(dear[i]))
    largest = sorted(range(len(dear)), key=lambda i: -node_bytes(dear[i]))
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
    return -node_bytes(node) / max(1, flops(node))


def survey(cut: Cut, candidates: Sequence[Plan]) -> list[CandidateCost]:
    """A row for each plan."""
    return [_row(plan, *cut(plan)) for plan in candidates]


def _row(plan: Plan, forward: GraphModule, backward: GraphModule) -> CandidateCost:
    ahead, back = extent(forward.graph), extent(backward.graph)
    largest, next_one = (*ahead.pieces, 0, 0)[:2]
    return CandidateCost(
        plan,
        ahead.returned,
        largest if largest >= 2 * next_one else 0,
        ahead.peak - ahead.returned,
        back.peak,
        work(forward.graph),
        work(backward.graph),
    )


def options(rows: Sequence[CandidateCost], scale: float, rates: Rates, offload: bool) -> tuple[PlanOption, ...]:
    """What a layer may choose from.

    scale: tokens of this batch by tokens of the one the rows are of. offload: whether what is saved may go to the host, all of it or all but the
    largest; copies are hidden behind the layer's own work, all of it, and what is longer than that is paid for.
    """
    kept = next(row for row in rows if row.plan == KEEP)
    found = []
    for row in rows:
        held, forward, backward = (int(n * scale) for n in (row.returned, row.forward, row.backward))
        extra = max(0.0, row.back.dear_ms(rates, scale) - kept.back.dear_ms(rates, scale))
        ahead, back = row.ahead.ms(rates, scale), row.back.ms(rates, scale)
        found.append(PlanOption(row.plan, held, forward, backward, extra, work=ahead + back))
        for stays in dict.fromkeys((0, int(row.largest * scale))) if offload else ():
            copy = (held - stays) / rates.copy
            waited = max(0.0, copy - ahead) + max(0.0, copy - back) + 0.02 * copy
            found.append(
                PlanOption(
                    row.plan,
                    stays,
                    forward,
                    backward,
                    extra + waited,
                    held - stays,
                    ahead + back + waited,
                    2 * copy - waited,
                )
            )
    return tuple(found)
