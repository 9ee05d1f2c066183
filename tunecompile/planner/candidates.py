"""Candidate plans of one region's joint graph, each with its bytes and milliseconds.

Which values are expensive to recompute is read from the joint graph. Each plan is tried on a copy of it, partitioned
and lowered as it would be for code generation, so that bytes are those of the real graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from tunecompile._torch.fake_tensors import size_hint
from tunecompile.ir.op import OPS, Cost, aten_name
from tunecompile.planner.cost_model import Work, flops, graph_work, node_cost
from tunecompile.planner.expert_rows import expert_rows, name_of_op
from tunecompile.planner.hardware import Rates
from tunecompile.planner.liveness import extent, node_bytes, tensor_bytes
from tunecompile.planner.recompute_attention import is_recomputable
from tunecompile.planner.solver import KEEP, RECOMPUTE, Plan, PlanOption

Cut = Callable[[Plan], tuple[GraphModule, GraphModule]]  #: a plan -> the lowered forward and backward graph


@dataclass(frozen=True)
class CandidateCost:
    """What one plan of one region costs at the sizes of one batch."""

    plan: Plan
    returned: int  #: bytes a layer returns from its forward: its outputs and what it saves
    largest: int  #: bytes of the largest of these tensors, where it is twice the next at least; else 0
    forward: int  #: bytes the forward needs beside those it returns
    backward: int  #: bytes the backward needs beside its inputs
    forward_work: Work
    backward_work: Work


def is_random(node: Node) -> bool:
    """Whether the call draws random numbers: recomputing it would need the same generator state."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def communicates(node: Node) -> bool:
    """Whether ranks exchange data here (tensor parallelism).

    Each rank plans alone, so all plans must have the same of these calls.
    """
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_c10d_functional"


def backward_nodes(graph: Graph) -> set[Node]:
    """The nodes of a joint graph that depend on a tangent."""
    reached: set[Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if tangent or any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def expensive_nodes(graph: Graph) -> list[Node]:
    """The products and attentions of a joint graph's forward part. A `Plan` names them by their index in this list.

    Those that return a vector (norms of weights) are left out: recomputing them would free next to nothing, and no plan
    does.
    """
    backward = backward_nodes(graph)
    return [
        node
        for node in graph.nodes
        if node not in backward and node_cost(node) is Cost.MATMUL and not is_random(node) and not _is_vector(node)
    ]


def _is_vector(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dim() < 2


def describe(node: Node) -> str:
    """An expensive call for the report: the op's name and the shape of its largest result, such as `mm 8192x4096`."""
    value = node.meta["val"]
    largest = (
        max((v for v in value if isinstance(v, torch.Tensor)), key=tensor_bytes)
        if isinstance(value, (tuple, list))
        else value
    )
    called = name_of_op(node) or aten_name(node.target)
    return f"{called.strip('_')} {'x'.join(str(size_hint(size)) for size in largest.shape)}"


def candidate_stages(graph: Graph) -> Iterator[list[Plan]]:
    """Lists of plans to survey, one after another until a plan fits.

    First the plan that keeps everything, then those that recompute, then those that run in tiles. Recomputed attention
    is last: it takes longest at the lengths at which all other plans do not fit.
    """
    yield [KEEP]
    yield [plan for plan in plans(graph) if plan != KEEP]
    yield from filter(None, (tiled_plans(graph, tiles) for tiles in TILES))
    if any(map(is_recomputable, graph.nodes)):
        yield [
            replace(plan, attention=True)
            for plan in (RECOMPUTE, *(Plan(None, tiles) for tiles in TILES if tiled_plans(graph, tiles)))
        ]


TILES = (4, 16)  #: numbers of tiles; they come late, since the graphs of many tiles take seconds to trace


def plans(graph: Graph) -> list[Plan]:
    """Plans from keeping all expensive values to recomputing everything, without tiles.

    Values are added in two orders: most bytes an operation first, and most bytes first. The second is there since what
    is left can be offloaded at no cost if it is small enough to be copied behind a layer's work.
    """
    expensive = expensive_nodes(graph)
    bargains = sorted(range(len(expensive)), key=lambda i: _bargain(expensive[i]))
    largest = sorted(range(len(expensive)), key=lambda i: -node_bytes(expensive[i]))
    nested = [Plan(frozenset(order[:count])) for count in range(len(expensive) + 1) for order in (bargains, largest)]
    return [*dict.fromkeys(nested), RECOMPUTE]


def tiled_plans(graph: Graph, tiles: int) -> list[Plan]:
    """Plans that run ops with a tiled form in `tiles` tiles, from keeping all other values to recomputing everything.

    Empty where no op has a tiled form.
    """
    expensive = expensive_nodes(graph)
    rows = {node for group in expert_rows(graph, backward_nodes(graph)) for node in group.products}
    others = [i for i, node in enumerate(expensive) if not has_tiled_form(node) and node not in rows]
    if len(others) == len(expensive):
        return []
    bargains = sorted(others, key=lambda i: _bargain(expensive[i]))
    return [*(Plan(frozenset(bargains[:count]), tiles) for count in range(len(others) + 1)), Plan(None, tiles)]


def has_tiled_form(node: Node) -> bool:
    """Whether the node is an op with a tiled form."""
    return node.target in OPS and OPS[node.target].tiled is not None


def _bargain(node: Node) -> float:
    """Minus the bytes that recomputing it frees for each floating point operation: smaller is better."""
    return -node_bytes(node) / max(1, flops(node))


def survey(cut: Cut, candidates: Sequence[Plan]) -> list[CandidateCost]:
    """Cut and lower the graph under each plan, and read off bytes and work.

    Args:
        cut: makes both graphs from a copy of the joint graph under a plan.
        candidates: plans.

    Returns:
        The costs of each plan, in bytes and `Work`.
    """
    return [_row(plan, *cut(plan)) for plan in candidates]


def _row(plan: Plan, forward: GraphModule, backward: GraphModule) -> CandidateCost:
    """Bytes and work of both lowered graphs."""
    ahead, back = extent(forward.graph), extent(backward.graph)
    largest, next_one = (*ahead.pieces, 0, 0)[:2]
    return CandidateCost(
        plan,
        ahead.returned,
        largest if largest >= 2 * next_one else 0,
        ahead.peak - ahead.returned,
        back.peak,
        graph_work(forward.graph),
        graph_work(backward.graph),
    )


def options(rows: Sequence[CandidateCost], scale: float, rates: Rates, offload: bool) -> tuple[PlanOption, ...]:
    """The options of one layer for one batch.

    Copies are hidden behind the layer's own work, forward and backward; milliseconds beyond that are part of an
    option's price.

    Args:
        rows: costs of the candidate plans.
        scale: tokens of this batch divided by tokens of the batch that the rows were surveyed with.
        rates: of the device, in operations and bytes a millisecond.
        offload: whether saved tensors may be offloaded, all of them or all but the largest.

    Returns:
        Options, in bytes and milliseconds.
    """
    kept = next(row for row in rows if row.plan == KEEP)
    found = []
    for row in rows:
        held, forward, backward = (int(n * scale) for n in (row.returned, row.forward, row.backward))
        extra = max(0.0, row.backward_work.math_ms(rates, scale) - kept.backward_work.math_ms(rates, scale))
        ahead, back = row.forward_work.ms(rates, scale), row.backward_work.ms(rates, scale)
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
