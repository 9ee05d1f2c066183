"""What graphs ask of the number of tokens, N: layers are compiled for a GPU, on any machine, and run op by op without it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from unittest import mock

import torch
from sympy import Eq
from torch import Tensor, nn

from tests.support import zoo
from tunecompile._torch.fake_tensors import copied, guards_at
from tunecompile.compiler.backend import Backend
from tunecompile.compiler.partitioner import Lowering
from tunecompile.compiler.pass_manager import Context
from tunecompile.ir import pretend_gpu
from tunecompile.ir.op import OPS
from tunecompile.ir.pretend_gpu import as_on_gpu
from tunecompile.planner.solver import KEEP, Plan
from tunecompile.runtime.layers.region import Region

#: tokens of batches
TOKENS = (1, 2, 127, 511, 512, 513, 1024, 8192)


@dataclass
class Compiled:
    """A graph of a layer, on a row of documents."""

    size: torch.SymInt  #: N
    providers: set[tuple[str, str]] = field(default_factory=set)  #: (op, provider) of both halves
    notes: list[str] = field(default_factory=list)  #: of the lower passes

    def broken(self, values: Sequence[int]) -> list[str]:
        """The guards that some of these values of N break, and those that are of N and another size."""
        env, symbol = self.size.node.shape_env, self.size.node.expr
        own = [str(guard) for guard, held in _own(self.size, values) if not all(held)]
        at = env.var_to_range[symbol]
        ranges = [f"{symbol} in {at}"] if min(values) < at.lower or max(values) > at.upper else []
        return own + ranges + [str(guard.expr) for guard in env.guards if _joins(guard.expr, symbol)]


def _own(size: torch.SymInt, values: Sequence[int]) -> Iterator[tuple[str, list[bool]]]:
    """(the number of a guard that is of N alone, whether each value keeps it)."""
    return ((f"guard {at} of N", held) for at, held in enumerate(guards_at(size, values)))


def _joins(guard, symbol) -> bool:
    """Whether a guard is of N and another size; that both are one size is none."""
    several = symbol in guard.free_symbols and len(guard.free_symbols) > 1
    return several and not (isinstance(guard, Eq) and all(side.is_symbol for side in guard.args))


@contextlib.contextmanager
def compiled_for_gpu(plan: Plan = KEEP) -> Iterator[list[Compiled]]:
    """Inside, layers are compiled by a plan, lowered for a GPU and for the CPU, and run as for the latter.

    What the first asks of sizes becomes Dynamo's guards, too. Each graph of rows of documents comes into the list.
    """
    graphs: list[Compiled] = []
    variant, compile_graph, lower = Region.variant, Backend._compile, Lowering.__call__

    def compiled(self, gm, *args, **kwargs):
        values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        sizes = (value.shape[1] for value in values if isinstance(value, Tensor) and value.dim() == 3)
        graphs.extend(Compiled(n) for n in [*sizes][:1] if isinstance(n, torch.SymInt))
        with as_on_gpu("h100"):
            return compile_graph(self, gm, *args, **kwargs)

    def lowered(self, graph):
        work, context = copied(graph.owning_module), Context(self.context.region, self.context.plan)
        if graphs:
            graphs[-1].providers.update(_providers(work.graph))
        lower(Lowering(self.passes, context), work.graph)
        if graphs:
            graphs[-1].notes += map(str, context.notes)
        before = pretend_gpu._pretending.set(False)
        try:
            lower(self, graph)
        finally:
            pretend_gpu._pretending.reset(before)

    with (
        mock.patch.object(Region, "variant", lambda self, _, kind: variant(self, plan, kind)),
        mock.patch.object(Backend, "_compile", compiled),
        mock.patch.object(Lowering, "__call__", lowered),
    ):
        yield graphs


def _providers(graph: torch.fx.Graph) -> Iterator[tuple[str, str]]:
    for node in graph.nodes:
        if (op := OPS.get(node.target)) is not None and (op.providers or not op.opaque):
            yield op.name, op.choose(torch.fx.map_arg(list(node.args), lambda n: n.meta["val"])).name


def in_half(model: nn.Module) -> nn.Module:
    """All of it in bf16, adapters too: the templates are for half precision."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.bfloat16()
    return model


def rows_of(tokens: int, vocabulary: int = 256, device: str = "cpu") -> dict:
    """A batch of so many tokens, in rows of at most 512 with padding behind them."""
    lengths = [min(512, tokens - begin) for begin in range(0, tokens, 512)]
    batch = zoo.batch(vocabulary, len(lengths), max(lengths) + 1, device=device, seed=tokens)
    place = torch.arange(max(lengths) + 1, device=device)
    real = place < torch.tensor(lengths, device=device)[:, None]
    labels = batch["input_ids"].where(real & (place > 0), -100)
    return {**batch, "labels": labels, "attention_mask": real.long()}
