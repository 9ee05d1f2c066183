"""What the report says of a model beside its regions: layers that came later, training in eval mode, weights that are in none, and weights that are parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tunecompile._torch.modules import slot_of
from tunecompile.compiler.plugins import report_lines
from tunecompile.runtime.find_layers import LayerStack, find_layers
from tunecompile.runtime.model_state import State
from tunecompile.runtime.parts import LossHead
from tunecompile.runtime.region import Region
from tunecompile.runtime.step import Step


def note_new_layers(model: nn.Module) -> list[str]:
    """Layers of an optimized model that came, or took another's place, since then. (An engine may have wrapped those that were there.)"""
    new = [
        layer
        for stack in find_layers(model)
        for layer in stack.members
        if all(slot_of(module) is None for module in layer.modules())
    ]
    return (
        [f"{len(new)} layers came after `optimize` and run as they are: call `restore`, then `optimize`, for them"]
        if new
        else []
    )


def note_eval_mode(model: nn.Module, in_eval: bool, regions: Sequence[Region]) -> list[str]:
    """Whether a model may have been trained in eval mode, as far as what ran tells: with gradients, and never in training mode."""
    if (
        not in_eval
        or any(region.variants for region in regions)
        or not any(p.requires_grad for p in model.parameters())
    ):
        return []
    return [
        "forwards with gradients ran in eval mode, which is taken for evaluation and runs as it is: model.train() before training steps has them compiled"
    ]


def note_outside(model: nn.Module, stacks: Sequence[LayerStack], head: nn.Module | None) -> list[str]:
    """Whether most of a model is in none of its repeated layers. Embeddings and head do not count."""
    inside = {id(p): p.numel() for stack in stacks for layer in stack.members for p in layer.parameters()}
    apart = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding) or module is head
        for p in module.parameters()
    }
    outside = sum(p.numel() for p in model.parameters() if id(p) not in inside and id(p) not in apart)
    if outside <= sum(inside.values()):
        return []
    return [
        f"most weights are in none of the repeated layers that were found ({', '.join(stack.path for stack in stacks)}), and run as they are"
    ]


def note_sharded(model: nn.Module, stacks: Sequence[LayerStack]) -> list[str]:
    """Whether the weights of layers are parts, with which they compute (tensor parallelism). Those that FSDP2 shards are whole by then."""
    parts = any(hasattr(p, "device_mesh") for stack in stacks for layer in stack.members for p in layer.parameters())
    if not parts or any(type(module).__name__.startswith("FSDP") for module in model.modules()):
        return []
    return [
        "linears of the layers are parts of linears (tensor parallelism): what they send stays as it is, and adapters beside them are not joined with them"
    ]


def note_outer(step: Step) -> list[str]:
    """Whether steps ran in a trace that is not ours."""
    told = {
        "the model was compiled as a whole by somebody else (torch.compile, model.compile)": step.outer,
        "torch.func, or forward-mode differentiation, transformed the model": step.transformed,
    }
    return [f"{what}: such steps run without tunecompile" for what, happened in told.items() if happened]


def model_notes(state: State) -> list[str]:
    """All notes beside those of regions, in the order in which they are printed."""
    model, stacks = state.model, find_layers(state.model)
    return [
        *report_lines(state.passes),
        *state.notes,
        *(note_outside(model, stacks, state.part(LossHead).embeddings) if stacks else []),
        *note_eval_mode(model, state.step.in_eval, state.regions),
        *note_new_layers(model),
        *note_sharded(model, stacks),
        *note_outer(state.step),
        *(note for part in state.parts for note in part.notes(state)),
        *state.replays.notes(),
    ]
