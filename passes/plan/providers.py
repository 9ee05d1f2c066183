"""Report which provider will run each op, and why. (Lowering is skipped where Inductor finds the code in its cache.)"""

import torch
from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.op import OPS, Op, Provider
from tunecompile.notes import note
from tunecompile.passes.plan.probe import choose, choose_beside
from tunecompile.planner.candidates import backward_nodes

__all__ = ["PASS"]

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def run(graph: Graph, context: Context) -> None:
    if (device := _device(graph)) is not None:
        choose_beside(device, context)
    for node in graph.nodes:
        op = OPS.get(node.target) if node.op == "call_function" else None
        if op is None or (op.opaque and not op.providers):
            continue
        values = torch.fx.map_arg(list(node.args), lambda n: n.meta["val"])
        provider = choose(op, values, context)
        label = f"{op.name}: {provider.name}"
        context.providers[label] += 1
        context.reasons.setdefault(label, {})[_reason(op, provider, values)] = None
        context.reduced += provider.precision is not None
        if provider.precision is None and context.precision is not None:
            context.notes += [
                note("not-in-precision", context.region, reason, op=op.name, precision=context.precision)
                for reason in op.refusals(values, context.precision).values()
            ]
    if context.precision is not None and (plain := _plain_products(graph)):
        context.notes.append(
            note("products-not-in-precision", context.region, count=plain, precision=context.precision)
        )


def _device(graph: Graph) -> torch.device | None:
    """Of the graph's first tensor."""
    values = (node.meta.get("val") for node in graph.nodes)
    return next((value.device for value in values if isinstance(value, torch.Tensor)), None)


def _reason(op: Op, provider: Provider, values: list) -> str:
    """What a provider gains, or who refused; empty where there is only the reference."""
    if provider.run is not op.reference:
        return provider.because
    return "; ".join(f"{name}: {why}" for name, why in op.refusals(values, None).items())


def _plain_products(graph: Graph) -> int:
    """How many products of the forward pass no op represents: linears without an adapter, or with a trained weight."""
    backward: set[Node] = backward_nodes(graph)
    return sum(node.target in _PRODUCTS and node not in backward for node in graph.nodes)


PASS = Pass("providers", "plan", run)
