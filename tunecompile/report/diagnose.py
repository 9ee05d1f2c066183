"""Notes of the report about the whole model: new layers, eval mode, weights outside of layers, sharded weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tunecompile._torch import lookup
from tunecompile._torch.dynamo import graph_limit
from tunecompile._torch.modules import slot_of
from tunecompile.compiler.plugins import report_lines
from tunecompile.integrations import private_names
from tunecompile.notes import Note, note
from tunecompile.runtime.layers.find_layers import LayerStack, find_layers
from tunecompile.runtime.layers.region import Region, is_of_evaluation
from tunecompile.runtime.layers.variant import Variant
from tunecompile.runtime.model_state import State
from tunecompile.runtime.parts import LossHead


def note_new_layers(model: nn.Module) -> list[Note]:
    """Note layers that were added or replaced after `optimize`. (Layers that an engine has wrapped are not new.)"""
    new = [
        layer
        for stack in find_layers(model)
        for layer in stack.members
        if all(slot_of(module) is None for module in layer.modules())
    ]
    return [note("new-layers", count=len(new))] if new else []


def note_eval_mode(model: nn.Module, in_eval: bool, regions: Sequence[Region]) -> list[Note]:
    """Note that the model may be trained in eval mode: forwards had gradients, none in training mode."""
    if (
        not in_eval
        or any(not is_of_evaluation(way) for region in regions for way, _ in region.variants)
        or not any(p.requires_grad for p in model.parameters())
    ):
        return []
    return [note("eval-mode")]


def note_outside(model: nn.Module, stacks: Sequence[LayerStack], head: nn.Module | None) -> list[Note]:
    """Note that most weights of a model are outside of its repeated layers. Embeddings and head do not count."""
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
    return [note("weights-outside-layers", ", ".join(stack.path for stack in stacks))]


def note_sharded(model: nn.Module, stacks: Sequence[LayerStack]) -> list[Note]:
    """Note tensor parallelism, where layers compute with shards. FSDP2 gathers its shards before a layer computes."""
    parts = any(hasattr(p, "device_mesh") for stack in stacks for layer in stack.members for p in layer.parameters())
    if not parts or any(type(module).__name__.startswith("FSDP") for module in model.modules()):
        return []
    return [note("sharded-linears")]


def model_notes(state: State) -> list[Note]:
    """All notes but those of regions, in the order in which they are printed."""
    model, stacks = state.model, find_layers(state.model)
    lost = [*lookup.notes(), *lookup.notes(private_names.PRIVATE_NAMES)]
    lost = [note("lost-name", detail=line) for line in lost]
    if off := lookup.why_off():
        return [note("compiling-off", detail=off), *lost]
    return [
        *lost,
        *report_lines(state.passes),
        *state.notes,
        *(note_outside(model, stacks, state.part(LossHead).embeddings) if stacks else []),
        *note_eval_mode(model, state.step.in_eval, state.regions),
        *note_new_layers(model),
        *note_sharded(model, stacks),
        *([note("compiled-from-outside")] * state.step.outer + [note("transformed")] * state.step.transformed),
        *(note("called-again", each.name) for each in state.regions if each.again and state.step.drops_cache),
        *(each for part in state.parts for each in part.notes(state)),
        *state.replays.notes(),
    ]


def region_notes(region: Region) -> list[Note]:
    """Which layers of a region ran eagerly or have graph breaks, and why."""
    variants, failures = list(region.variants.values()), [each.failures for each in region.backends.values()]
    told = [failure for each in failures for failure in each]
    told += [note("graph-break", region.name, reason) for variant in variants for reason in variant.breaks]
    told += region.effort.refused.values()
    for variant in variants:
        if not (
            variant.graphs or variant.ran or variant.eager
        ):  # its function ran under Dynamo, which could trace nothing
            told.append(_eager(region, _skipped(variant)))
        if variant.eager:
            told.append(_eager(region, _not_traced(variant), variant.eager))
    told += [_eager(region, why, calls) for why, calls in region.refused.items()]
    told += [note("weights-read", region.name)] * region.weights_read
    return told + [_eager(region, note("called-without-owner"))] * region.bypassed


def _eager(region: Region, why: str, calls: int = 0) -> Note:
    """calls: 0 where they were not counted."""
    return note("ran-eagerly", region.name, why, times=f" {calls} times" if calls else "")


def _skipped(variant: Variant) -> Note:
    """Why Dynamo made no graph, and called none of ours eagerly either."""
    if variant.full:
        return note("shared-graph-limit", variant.full, limit=graph_limit())
    return note("skipped-by-dynamo")


def _not_traced(variant: Variant) -> Note:
    """Why calls of a variant ran eagerly."""
    if variant.graphs >= graph_limit():
        return note("graph-limit", limit=graph_limit())
    return note("not-traceable", detail=variant.refused or "no reason is given")
