"""What the report says of a model beside its regions: layers that came later, training in eval mode, weights that are in none, and weights that are parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tunecompile._torch.modules import slot_of
from tunecompile.compiler.plugins import said
from tunecompile.integrations import peft_parametrize
from tunecompile.integrations.rank_store import RankStore
from tunecompile.runtime.find_layers import LayerStack, find_layers
from tunecompile.runtime.layer_slot import LayerSlot
from tunecompile.runtime.model_state import VERIFIED, State
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


def model_notes(state: State) -> list[str]:
    """All there is to say beside the regions, in the order in which it is printed."""
    model, stacks = state.model, find_layers(state.model)
    return [
        *said(state.passes),
        *state.notes,
        *(note_outside(model, stacks, state.embeddings) if stacks else []),
        *note_other_ranks(state.board),
        *peft_parametrize.said(state.parametrising),
        *(note for padding in state.paddings for note in padding.report()),
        *note_eval_mode(model, state.step.in_eval, state.regions),
        *note_new_layers(model),
        *note_sharded(model, stacks),
        *note_outer(state.step),
        *note_checkpointing(state.slots),
        *note_unused_heads(state),
        *note_replicas(state.replicated),
        *(state.tables.said() if state.tables else []),
        *state.replays.notes(),
        *note_budgets(state.step),
    ]


def note_other_ranks(board: RankStore | None) -> list[str]:
    """How the first step was on them."""
    others = (
        [(rank, *told) for rank, told in board.said(VERIFIED).items() if rank != board.rank]
        if board is not None
        else []
    )
    broken = [f"rank {rank}: {told}" for rank, passed, told in others if not passed]
    return (
        [f"verified on {len(others)} of {board.ranks - 1} other ranks: {'; '.join(broken) or 'it is right there, too'}"]
        if others
        else []
    )


def note_replicas(replicated: bool) -> list[str]:
    """Whether nn.DataParallel ran copies of the model."""
    return (
        ["nn.DataParallel's replicas ran without tunecompile: start one process a GPU (torchrun), or show it one GPU"]
        if replicated
        else []
    )


def note_outer(step: Step) -> list[str]:
    """Whether steps ran in a trace that is not ours."""
    told = {
        "the model was compiled as a whole by somebody else (torch.compile, model.compile)": step.outer,
        "torch.func, or forward-mode differentiation, transformed the model": step.transformed,
    }
    return [f"{what}: such steps run without tunecompile" for what, happened in told.items() if happened]


def note_checkpointing(slots: Sequence[LayerSlot]) -> list[str]:
    """Whether a function of the user's is called around compiled layers."""
    count = sum(slot.checkpointed_by is not None for slot in slots)
    return (
        [
            f"{count} layers are checkpointed by a function that does more than torch's, such as copying to the host (offload=True): it is called around the compiled layers. "
            "memory= plans recomputation and copies itself"
        ]
        if count
        else []
    )


def note_unused_heads(state: State) -> list[str]:
    """A head that no training step called, where there were steps."""
    if not any(region.variants for region in state.regions):
        return []
    forward = state.model.__dict__.get("forward") or getattr(state.base(), "__dict__", {}).get("forward")
    where = getattr(forward, "__globals__", {}).get(
        "__name__", "another package"
    )  # `__module__` is the wrapped function's
    who = f"{where} replaced the model's forward and" if forward else "the loop"
    return [
        f"the head is never called: {who} computes the loss from its weight, which is left alone"
        for _ in state.unused_heads()
    ]


def note_budgets(step: Step) -> list[str]:
    """What budgets have to say, and how often memory ran out."""
    budgets = step.budgets
    told = [note if len(budgets) == 1 else f"{budget.device}: {note}" for budget in budgets for note in budget.said()]
    return told + step.recovery.said() if budgets else []
