"""Autograd: which pass is running, who takes saved tensors, whether a trace that is not ours is under way."""

from __future__ import annotations

import contextlib

import torch
from torch._functorch._aot_autograd.schemas import OutputType, ViewAndMutationMeta
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.checkpoint import CheckpointPolicy

from tunecompile._torch.dynamo import is_compiling

__all__ = [
    "CheckpointPolicy",
    "differentiable_outputs",
    "in_checkpoint",
    "keeps_graph",
    "no_autocast",
    "others_trace",
    "outside_compilation",
    "saving_is_taken",
]

no_autocast = torch._C._DisableAutocast


def in_checkpoint() -> bool:
    """Whether a non-reentrant `torch.utils.checkpoint` is under way: it will repeat what is called now, in the backward pass."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def saving_is_taken() -> str | None:
    """Why hooks for saved tensors must not be set now; None where they may. (Autograd calls the innermost hooks only.)"""
    if torch._C._current_graph_task_id() != -1:
        return "recomputed in the backward pass, where it is used at once"
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():
        return "hooks for saved tensors are forbidden here (torch.func)"
    if in_checkpoint():
        return "inside a checkpoint"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "other hooks take the saved tensors"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "recorded as a CUDA graph, whose memory is its own"
    return None


def differentiable_outputs(node: torch.autograd.graph.Node) -> set[int] | None:
    """Which outputs of a compiled graph's node have a history. Views are made outside of it. None of another node."""
    made = getattr(getattr(type(node), "_forward_cls", None), "metadata", None)
    if not isinstance(made, ViewAndMutationMeta):
        return None
    start = made.num_mutated_inp_runtime_indices
    return {
        start + at
        for at, output in enumerate(made.output_info)
        if output.requires_grad and output.output_type is OutputType.non_alias
    }


def keeps_graph() -> bool:
    """In a backward pass: whether the caller retains its graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


@contextlib.contextmanager
def outside_compilation():
    """Inside a backend: real tensors, whatever autocast and whichever fake mode it was called under."""
    with unset_fake_temporarily(), no_autocast():
        yield


def others_trace() -> bool:
    """Whether the model runs in a trace that is not ours: compiled from outside, or under a transform of `torch.func` or of forward-mode derivatives. Tensors
    of these have no storage, and ordinary autograd functions, as compiled code is one, refuse them."""
    return (
        is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def in_backward() -> bool:
    """Whether a backward pass is under way in this thread: what is called now is recomputed by a checkpoint, or called by a hook."""
    return torch._C._current_graph_task_id() != -1


set_grad_enabled = torch._C._set_grad_enabled  #: what `with torch.no_grad()` leaves in a graph
plain_functions = torch._C.DisableTorchFunction  #: inside, no `__torch_function__` is asked, modes' neither
plain_tensors = (
    torch._C.DisableTorchFunctionSubclass
)  #: inside, subclasses are asked as tensors: 4-bit parameters would answer each question in Python
