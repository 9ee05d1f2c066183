"""The matrix product of a head, whatever module it is: its weight, and the two matrices of an adapter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from tunecompile._torch.dynamo import call_compiled
from tunecompile._torch.fake_tensors import copied
from tunecompile._torch.modules import call_original, linear
from tunecompile.compiler.backend import WeakBackend, own_code
from tunecompile.compiler.pass_manager import Context, Pass, run_stage
from tunecompile.integrations.deepspeed import whole
from tunecompile.ir.canonicalize import canonicalize, value
from tunecompile.ir.logit_chain import Unfit
from tunecompile.notes import Note, note
from tunecompile.ops import lora_linear
from tunecompile.ops.frozen_weights import DENSE


class NotLinear(Unfit):
    """The head does something else."""


@dataclass(frozen=True)
class LinearHead:
    """logits = x weight^T + bias + scale (x down^T) up^T, the last term in `adapter_dtype`, all others in `dtype`."""

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    down: Tensor | None = None
    up: Tensor | None = None
    scale: float = 1.0
    adapter_dtype: torch.dtype | None = None
    state: tuple = ()  #: of its tensors when the head was called, as `state_now` returns it

    def state_now(self) -> tuple[tuple[int, int], ...]:
        """Address and version of each tensor: a write changes one of them. (One through `.data` does not.)"""
        tensors = [each for each in (self.weight, self.bias, self.down, self.up) if each is not None]
        return tuple([(_address(each), 0 if each.is_inference() else each._version) for each in tensors])

    @property
    def changed(self) -> bool:
        """Whether a tensor was written to, or its memory replaced, since the head was called."""
        return bool(self.state) and self.state != self.state_now()

    @property
    def vocabulary(self) -> int:
        """The number of logits of a row."""
        return whole(self.weight).shape[0]

    def is_like(self, other: LinearHead) -> bool:
        """Whether both are of the same tensors."""
        mine, theirs = self._parts(), other._parts()
        return all(one is another for one, another in zip(mine[:4], theirs[:4])) and mine[4:] == theirs[4:]

    def _parts(self) -> tuple:
        return self.weight, self.bias, self.down, self.up, self.scale, self.dtype, self.adapter_dtype

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of hidden states [..., H]."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        made = linear(hidden.to(self.dtype), self.weight.to(self.dtype), bias)
        return made if self.down is None else (made + self.inner(hidden) @ self.outer().t()).to(self.dtype)

    def inner(self, hidden: Tensor) -> Tensor | None:
        """Return scale * x down^T, [T, r]; None without an adapter."""
        return (
            None
            if self.down is None
            else (hidden.to(self.adapter_dtype) @ self.down.to(self.adapter_dtype).t()) * self.scale
        )

    def outer(self) -> Tensor | None:
        """Return up, [V, r], in `adapter_dtype`; None without an adapter."""
        return None if self.up is None else self.up.to(self.adapter_dtype)


def _address(tensor: Tensor) -> int:
    """0 for a subclass, which may have none."""
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0


def _head(module: nn.Module, hidden: Tensor) -> Tensor:
    return call_original(module, hidden)


class HeadTracer:
    """Has Dynamo trace a head, and reads the product off the graph. Dynamo's guards see to it that what was read is
    still so: another adapter, or another weight, is read anew."""

    def __init__(self, module: nn.Module, passes: Sequence[Pass]):
        self.module, self.passes = module, passes
        self.found: LinearHead | None = None
        self.reason: Note | None = None

        self.call = torch.compile(own_code(_head, "head"), backend=WeakBackend(self._backend), fullgraph=True)

    def product(self, hidden: Tensor) -> LinearHead:
        """For hidden states like these.

        Raises:
            NotLinear: the head is no linear, with or without an adapter.
        """
        like = (
            torch.empty((1,), dtype=hidden.dtype, device=hidden.device)
            .expand(hidden.shape)
            .detach()
            .requires_grad_(hidden.requires_grad)
        )
        self.found, before = None, [dict(vars(module)) for module in self.module.modules()]
        try:
            call_compiled(self.call, self.module, like)
        except Exception as error:  # Dynamo cannot trace it, or breaks the graph: its logits are computed
            line = str(error).strip().splitlines()[0][:100]
            raise NotLinear(self.reason or note("cannot-be-traced", detail=line)) from None
        if self._keeps_something(before):
            raise NotLinear(note("keeps-results"))
        if self.found is None:
            raise NotLinear(self.reason or note("not-traced"))
        return self.found

    def _keeps_something(self, before: list[dict[str, Any]]) -> bool:
        """Whether the head stored results of the call, whose input was blank. Its attributes are restored."""
        changed = False
        for module, then in zip(self.module.modules(), before):
            now = vars(module)
            if now.keys() != then.keys() or any(now[name] is not then[name] for name in then):
                changed = True
                now.clear()
                now.update(then)
        return changed

    def _backend(self, gm: GraphModule, inputs: list) -> Callable:
        work = copied(gm)
        canonicalize(work)
        run_stage(self.passes, "recognize", work.graph, Context("head"))
        try:
            read = _read(work.graph)
        except NotLinear as other:
            self.reason = other.reason
            read = None

        tracer = weakref.ref(self)  # Dynamo's cache holds `run`, out of reach of Python's garbage collector

        def run(*arguments: Any) -> list:
            if (owner := tracer()) is not None:
                owner.found = read(arguments) if read is not None else None
            return [arguments[0]]  # unused

        return run


def _read(graph: Graph) -> Callable[[Sequence[Any]], LinearHead]:
    """A function from the graph's inputs to the product that it computes."""
    inputs = list(graph.find_nodes(op="placeholder"))
    (returned,) = graph.find_nodes(op="output")
    outputs = returned.args[0]
    y = outputs[0] if len(outputs) == 1 else None
    if y is None or not isinstance(y, Node):
        raise NotLinear(note("returns-more"))
    path = {y}
    y = _source(y, path)
    exact = value(y).dtype
    if y.target is linear:
        x, weight, bias = (*y.args, None)[:3]
        rest = ()
    elif y.target is getitem and y.args[0].target is lora_linear.overload and y.args[1] == 0:
        x, own, weights, biases, down, up, scales, adapter_dtype, stored = y.args[0].args
        if own:
            raise NotLinear(note("adapter-with-dropout"))
        if len(weights) != 1 or stored != DENSE:
            raise NotLinear(note("several-weights"))
        weight, bias, rest = weights[0], biases[0] if biases else None, (down[0], up[0])
    else:
        raise NotLinear(note("no-linear"))
    read = [_source(node, path, exact) if node is not None else None for node in (x, weight, bias)]
    read += [_source(node, path, adapter_dtype) for node in rest]
    if any(node is not None and node.op != "placeholder" for node in read):
        raise NotLinear(note("computed-weights"))
    path |= {y, *([y.args[0]] if rest else ())}
    if any(
        node.op not in ("placeholder", "output")
        and node not in path
        and not (node.target is getitem and not node.users)
        for node in graph.nodes
    ):
        raise NotLinear(note("more-than-product"))
    tensors = [None if node is None else inputs.index(node) for node in read[1:]]

    def product(arguments: Sequence[Any]) -> LinearHead:
        weight, bias, *adapter = (None if place is None else arguments[place] for place in tensors)
        if not adapter:
            return LinearHead(weight, bias, exact)
        down, up = adapter
        return LinearHead(weight, bias, exact, down, up, scales[0], adapter_dtype)

    return product


def _source(node: Node, path: set[Node], exact: torch.dtype | None = None) -> Node:
    """The source of casts that lose nothing, or that are to the dtype `exact`, in which it is read anyway."""
    while (
        node.op == "call_method"
        and node.target == "to"
        and len(node.args) == 2
        and isinstance(node.args[1], torch.dtype)
    ):
        given, made = value(node.args[0]).dtype, value(node).dtype
        if made not in (given, exact) and (exact is None or torch.promote_types(given, made) != made):
            break
        path.add(node)
        node = node.args[0]
    return node
