"""Ops of ours in two processes: which providers each has, and how they run while there is no code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.fx import Graph

from tunecompile.ir.eager_call import run_provider
from tunecompile.ir.op import OPS, Op

__all__ = ["agree", "foreign_modules", "providers_now", "run_by_provider"]

#: of each op by name: (name of a provider, whether it is trusted), in order
Told = dict[str, tuple[tuple[str, bool], ...]]


def providers_now() -> Told:
    """The providers of all ops in this process. Trials and measurements change them."""
    return {op.name: tuple((each.name, each.trusted) for each in op.providers) for op in OPS.values()}


def agree(told: Told) -> None:
    """Give ops the providers that they have in another process, in that order.

    Args:
        told: by the other process. Ops that this one does not know are left out: a graph with one cannot come here.

    Raises:
        LookupError: this process lacks a provider.
    """
    for op in OPS.values():
        if op.name in told:
            known = {each.name: each for each in op.providers}
            op.providers[:] = [_as_told(known, name, trusted) for name, trusted in told[op.name]]


def _as_told(known: dict, name: str, trusted: bool) -> Any:
    provider = known[name]  # a KeyError is a LookupError
    return provider if trusted else provider.distrusted("it failed a trial")


def foreign_modules(graphs: Sequence[Graph]) -> tuple[str, ...]:
    """Modules of other packages that define ops of these graphs."""
    found = {OPS[node.target].reference.__module__ for graph in graphs for node in graph.nodes if node.target in OPS}
    return tuple(sorted(name for name in found if not name.startswith("tunecompile.")))


def run_by_provider(target: Any) -> Callable | None:
    """What runs in the place of a call, where its reference would take far more memory than compiled code does."""
    op = OPS.get(target)
    return None if op is None or not op.large else partial(_run, op)


def _run(op: Op, *args: Any) -> Any:
    return run_provider(op.choose(args).run, args, (True,) * len(op.overload._schema.returns))
