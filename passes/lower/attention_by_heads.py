"""Run attention's backward on a few heads at a time where all heads at once would need gigabytes of workspace.

Heads are independent, so the gradients are bitwise the same. Vendors' kernels sum dq in fp32 and make dk and dv for
every head of q (`liveness.workspace`): 6 GiB at 160k tokens of 32 heads. At such lengths a few heads keep the GPU
busy."""

import functools
from collections import Counter
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from tunecompile import templates
from tunecompile._torch.fake_tensors import size_hint
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.op import aten_name, has_triton
from tunecompile.ir.pretend_gpu import on_gpu
from tunecompile.ir.views import inverse, memory_order
from tunecompile.passes.lower.choose_provider import expand
from tunecompile.planner.liveness import tensor_bytes, workspace
from tunecompile.planner.recompute_attention import bound_arguments

__all__ = ["PASS"]

ROOM = 2 << 30  #: bytes beside its results, from which on a call is split
EACH = 1 << 30  #: that each of its parts may need then
KERNELS = ("cudnn", "flash")  #: which read by stride all that they are given; "efficient" takes the output to be dense
DENSE = "logsumexp"  #: sums of the softmax, which flash takes to be dense
BY_HEAD = ("grad_out", "query", "key", "value", "out", DENSE)  #: arguments [batch, heads, ...]


def run(graph: Graph, context: Context) -> None:
    for node in list(graph.nodes):
        if (groups := _groups(node)) > 1:
            orders = tuple(
                memory_order(value) if isinstance(value, torch.Tensor) and value.numel() else None
                for value in node.meta["val"]
            )
            expand(
                graph,
                node,
                functools.partial(
                    in_turn,
                    target=node.target,
                    groups=groups,
                    orders=orders,
                    apart=_apart(node),
                    options=tuple(node.kwargs.items()),
                ),
                context.traced,
            )


def in_turn(
    *args: Any, target: Any, groups: int, orders: tuple, apart: tuple, options: tuple
) -> list[torch.Tensor | None]:
    """The results of `target(*args, **dict(options))`, from as many calls as there are groups of heads."""
    names = [argument.name for argument in target._schema.arguments]
    given = [_copy(value) if i in apart else value for i, value in enumerate(args)]
    calls = [
        target(
            *(_share(value, i, groups, name) if name in BY_HEAD else value for value, name in zip(given, names)),
            **dict(options),
        )
        for i in range(groups)
    ]
    return [_join(pieces, order) for pieces, order in zip(zip(*calls), orders)]


def _apart(node: Node) -> tuple[int, ...]:
    """The arguments to copy, since they would keep a larger tensor alive: v, for one, a view of the product q|k|v."""
    given = {
        i: fake
        for i, source in enumerate(node.args)
        if isinstance(source, Node) and isinstance(fake := source.meta.get("val"), torch.Tensor)
    }
    read: Counter[int] = Counter()
    for fake in given.values():
        read[fake.untyped_storage()._cdata] += tensor_bytes(fake)
    return tuple(
        i for i, fake in given.items() if 2 * read[(whole := fake.untyped_storage())._cdata] < size_hint(whole.nbytes())
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy made by a kernel of its own.

    Inductor fuses a clone into its users. Each call would then copy its own heads, and the larger tensor would stay
    alive until the last call."""
    if not (on_gpu(tensor) and has_triton()):
        return tensor.clone()
    batch, heads, length, dim = tensor.shape
    rows = tensor.transpose(1, 2).reshape(batch * length, heads * dim)
    out = torch.empty(rows.shape, dtype=tensor.dtype, device=tensor.device)
    templates.lora.append_rows(rows, out, 0)
    return out.view(batch, length, heads, dim).transpose(1, 2)


def _share(tensor: torch.Tensor, i: int, groups: int, name: str) -> torch.Tensor:
    heads = tensor.shape[1] // groups
    part = tensor.narrow(1, i * heads, heads)
    return part.contiguous() if name == DENSE else part


def _join(pieces: tuple, order: tuple[int, ...] | None) -> torch.Tensor | None:
    """All heads, laid out in memory as one call would have done."""
    if order is None:
        return None
    whole = torch.cat([piece.permute(order) for piece in pieces], order.index(1))
    return whole.permute(inverse(order))


def _groups(node: Node) -> int:
    """How many calls it takes; 1 where heads are not all that the call is about, or nothing is gained."""
    name = aten_name(node.target) if node.op == "call_function" else ""
    known = any(name.startswith(f"_scaled_dot_product_{kernel}_attention") for kernel in KERNELS)
    if not (known and name.endswith("_backward")) or (needed := workspace(node)) <= ROOM:
        return 1
    given = bound_arguments(node)
    heads = [given[key].meta["val"].shape[1] for key in ("query", "key", "value", "out")]
    read = all(user.target is getitem for user in node.users)
    if (
        given["dropout_p"]
        or given.get("attn_bias") is not None
        or given.get("attn_mask") is not None
        or not read
        or not all(isinstance(count, int) for count in heads)
        or heads[1] != heads[2]
        or heads[0] != heads[3]
    ):
        return 1
    return next((n for n in range(2, heads[1]) if heads[1] % n == 0 and needed <= n * EACH), heads[1])


PASS = Pass("attention_by_heads", "lower", run, requires=frozenset({"choose_provider"}))
