"""Autograd: which pass is running, who takes saved tensors, whether a trace of another owner is under way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import CheckpointPolicy  # noqa: F401 (planner and passes read it here)

from tunecompile._torch.dynamo import is_compiling, under_way
from tunecompile._torch.lookup import exist, lookup

#: whether `clamp` gives no gradient to a value that equals its limit (torch 2.13 does)
CLAMP_CUTS_AT_LIMIT = TorchVersion(torch.__version__) >= "2.14"


@contextlib.contextmanager
def _autocast_off() -> Iterator[None]:
    """`no_autocast` by the public context, a device type at a time."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _nothing(*_: Any) -> None:
    return None


_SCHEMAS = "torch._functorch._aot_autograd.schemas"
_output_type = lookup(f"{_SCHEMAS}.OutputType")
_graph_metadata = lookup(f"{_SCHEMAS}.ViewAndMutationMeta")
_OUTPUTS_ARE_KNOWN = exist(
    *("OutputType", "ViewAndMutationMeta", "ViewAndMutationMeta.output_info"),
    "ViewAndMutationMeta.num_mutated_inp_runtime_indices",
    under=_SCHEMAS,
)
_graph_task = lookup("torch._C._current_graph_task_id", lambda: -1)
#: the backward pass whose hook makes the calls that are under way
_begun_in: ContextVar[int] = ContextVar("begun_in", default=-1)
_top_hooks = lookup("torch._C._autograd._top_saved_tensors_default_hooks")
_hooks_are_allowed = lookup("torch._C._autograd._saved_tensors_hooks_is_enabled")
_CAN_TAKE = (
    _top_hooks is not None
    and _hooks_are_allowed is not None
    and exist("torch.multiprocessing.reductions.StorageWeakRef")
)
_unset_fake = lookup("torch._subclasses.fake_tensor.unset_fake_temporarily", contextlib.nullcontext)
_transform = lookup("torch._C._functorch.peek_interpreter_stack", _nothing)

_NODES_ARE_NUMBERED = exist("torch._C._autograd._get_sequence_nr", "torch._C._FunctionBase._sequence_nr")
#: the number of this thread's next node of an autograd graph
next_number = lookup("torch._C._autograd._get_sequence_nr", lambda: 0)

#: in a backward pass: whether the caller retains its graph. True where torch does not tell
keeps_graph = lookup("torch._C._autograd._get_current_graph_task_keep_graph", lambda: True)

no_autocast = lookup("torch._C._DisableAutocast", _autocast_off)  #: a context without autocast, on any device
set_grad_enabled = lookup("torch._C._set_grad_enabled")  #: what `with torch.no_grad()` leaves in a graph
#: inside, no `__torch_function__` is asked, modes' neither
plain_functions = lookup("torch._C.DisableTorchFunction", contextlib.nullcontext)
#: inside, subclasses answer as tensors: 4-bit parameters would answer each question in Python
plain_tensors = lookup("torch._C.DisableTorchFunctionSubclass", contextlib.nullcontext)


def innermost_hooks() -> tuple[Any, Any] | None:
    """The innermost hooks for saved tensors, (pack, unpack); None without any, or where torch does not tell."""
    return None if _top_hooks is None else _top_hooks(True)


def in_checkpoint() -> bool:
    """Whether a non-reentrant `torch.utils.checkpoint` is under way: the backward pass will repeat this call.

    True where torch does not tell.
    """
    if _top_hooks is None:
        return True
    hooks = innermost_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def saving_is_taken() -> str | None:
    """Why hooks for saved tensors must not be set now; None where they may.

    (Autograd calls the innermost hooks only.)
    """
    if not _CAN_TAKE:
        return "this version of torch does not tell whether other hooks take the saved tensors"
    if in_backward():
        return "recomputed in the backward pass, where it is used at once"
    if not _hooks_are_allowed():
        return "hooks for saved tensors are forbidden here (torch.func)"
    if in_checkpoint():
        return "inside a checkpoint"
    if innermost_hooks() is not None:
        return "other hooks take the saved tensors"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "recorded as a CUDA graph, whose memory is its own"
    return None


def made_since(node: torch.autograd.graph.Node, number: int) -> bool:
    """Whether this thread made a node of an autograd graph since `next_number` gave this number.

    A leaf's node counts, whenever it was made. False where torch does not tell.
    """
    return _NODES_ARE_NUMBERED and node._sequence_nr() >= number


def differentiable_outputs(node: torch.autograd.graph.Node) -> set[int] | None:
    """Which outputs of a compiled graph's node have a history; None of another node.

    Views are not among them: they are made outside the graph.
    """
    made: Any = getattr(getattr(type(node), "_forward_cls", None), "metadata", None)
    if not _OUTPUTS_ARE_KNOWN or not isinstance(made, _graph_metadata):
        return None
    start = made.num_mutated_inp_runtime_indices
    return {
        start + at
        for at, output in enumerate(made.output_info)
        if output.requires_grad and output.output_type is _output_type.non_alias
    }


@contextlib.contextmanager
def outside_compilation() -> Iterator[None]:
    """Inside a backend: real tensors, whatever autocast and whichever fake mode it was called under."""
    with _unset_fake(), no_autocast():
        yield


def others_trace() -> bool:
    """Whether the model runs in a trace of another owner: compiled from outside, `torch.func` or forward-mode AD.

    Tensors of these have no storage, and autograd functions, as compiled code is one, refuse them.
    """
    return is_compiling() or _transform() is not None or getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


def in_backward() -> bool:
    """Whether this thread runs a backward pass, which repeats a call: a checkpoint does."""
    return _graph_task() not in (-1, _begun_in.get())


def begins_in_backward() -> bool:
    """Whether a hook of a backward pass makes this call, which then is no repetition.

    Losses that cache gradients run each part of a batch so. (Checkpoints are an autograd function's backward, or
    unpack tensors.)
    """
    if not in_backward():
        return False
    for frame in under_way():
        home = frame.f_globals.get("__name__", "")
        if home in ("torch.autograd.function", "torch.utils.checkpoint"):
            return False
        if home in ("torch.autograd", "torch.autograd.graph"):
            return True
    return False


@contextlib.contextmanager
def begun_in_backward() -> Iterator[None]:
    """Inside, the backward pass that runs now is not taken for one that repeats calls. Passes inside of it are."""
    token = _begun_in.set(_graph_task())
    try:
        yield
    finally:
        _begun_in.reset(token)


def walk(edges: Sequence[GradientEdge], stops: Sequence[GradientEdge]) -> tuple[list[Node], dict[Node, set[int]]]:
    """The nodes of the leaves that a graph ends in, and all its nodes, each with its used outputs.

    Does not go beyond `stops`.
    """
    leaves, pending = [], [(edge.node, edge.output_nr) for edge in edges]
    reached = {stop.node: set() for stop in stops}
    while pending:
        node, output = pending.pop()
        if node in reached:
            reached[node].add(output)
            continue
        reached[node] = {output}
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node)
        pending.extend((behind, output) for behind, output in node.next_functions if behind is not None)
    return leaves, reached
