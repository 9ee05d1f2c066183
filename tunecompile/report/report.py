"""The report of an optimized model: regions, matches, refusals with reasons, providers, saved bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from tunecompile._torch.fake_tensors import size_hint
from tunecompile._torch.modules import slot_of
from tunecompile.compiler.pass_manager import Change, MatchCount
from tunecompile.notes import Note, note
from tunecompile.planner.device_memory import shown
from tunecompile.planner.solver import plan_lines
from tunecompile.report.diagnose import model_notes, region_notes
from tunecompile.runtime.layers.region import Region, contexts_of, pieces_of
from tunecompile.runtime.model_state import State
from tunecompile.runtime.parts import StepTelemetry

__all__ = ["RegionReport", "Report"]


@dataclass(frozen=True)
class RegionReport:
    """One compiled region."""

    name: str  #: path and class of its layers
    layers: int  #: number of layers that use it
    compiles: int  #: number of compiled graphs
    recompiles: list[str]  #: the guards that failed and led to a recompilation
    saved_bytes: list[int]  #: bytes a layer that each of its graphs saves for the backward pass
    providers: dict[str, int]  #: calls a layer, by "op: provider"
    reasons: dict[str, list[str]]  #: by the same names: what the provider gains, or why others refused
    changes: list[Change]  #: operations that each pass added or removed in the last graph; none of `lower` if cached
    breaks: list[str]  #: reasons of graph breaks
    seconds: float = 0.0  #: that its compilations took


@dataclass(frozen=True)
class Report:
    """What tunecompile did to a model. Print it, or read it with `to_dict()`."""

    model: str  #: class of the model
    regions: list[RegionReport] = field(default_factory=list)  #: the kinds of layers, and the norms outside of layers
    #: one a family, counted per layer, in the last graph compiled of each region
    matches: list[MatchCount] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)  #: other findings, a sentence each
    #: the plan under a budget, in bytes and milliseconds, for the first device with layers
    memory: dict[str, Any] | None = None
    elsewhere: list[dict[str, Any]] = field(default_factory=list)  #: the same for other devices

    @property
    def compiles(self) -> int:
        """Number of compiled graphs of all regions."""
        return sum(region.compiles for region in self.regions)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, ready for JSON; `saved_bytes` is the sum over all layers."""
        return {
            "model": self.model,
            "regions": [asdict(r) for r in self.regions],
            "matches": [asdict(m) for m in self.matches],
            "notes": [str(each) for each in self.notes],
            "memory": self.memory,
            "elsewhere": self.elsewhere,
            "compiles": self.compiles,
            "saved_bytes": sum(r.saved_bytes[-1] * r.layers for r in self.regions if r.saved_bytes) or None,
        }

    def __str__(self) -> str:
        lines = [f"tunecompile: {self.model}"]
        for r in self.regions:
            saved = f", {r.saved_bytes[-1] / 2**20:.2f} MiB saved a layer" if r.saved_bytes else ""
            took = f" in {r.seconds:.1f} s" if r.seconds >= 0.1 else ""
            lines.append(f"  region {r.name}: {r.layers} layers, compiled {r.compiles}x{took}{saved}")
            lines += [f"    recompiled because {reason}" for reason in r.recompiles]
            for name, count in sorted(r.providers.items()):
                lines += [f"    {count:3d} x {name}", *(f"          {reason}" for reason in r.reasons.get(name, []))]
        if any(m.found for m in self.matches):
            lines.append(f"  {'family':22s}{'found':>7s}{'rewritten':>11s}")
        for m in self.matches:
            if m.found:
                lines.append(f"  {m.family:22s}{m.found:7d}{m.rewritten:11d}")
                lines += [f"      refused: {reason}" for reason in dict.fromkeys(m.refused)]
        for plan in [*([self.memory] if self.memory else []), *self.elsewhere]:
            lines += _memory_lines(plan, of_several=bool(self.elsewhere))
        if not self.compiles and not any(each.code == "never-called" for each in self.notes):
            lines.append("  nothing is compiled yet: run one training step")
        return "\n".join([*lines, *(f"  note: {each}" for each in self.notes)])


def _memory_lines(memory: dict[str, Any], of_several: bool) -> list[str]:
    measured = f", measured {shown(memory['measured_peak'])}" if memory["measured_peak"] else ""
    where = f" of {memory['device']}" if of_several else ""
    lines = [
        f"  memory{where}: peak predicted {shown(memory['predicted_peak'])}{measured}, "
        f"allowed {shown(memory['budget'])}, for {memory['tokens']} tokens"
    ]
    if memory["predicted_ms"]:
        took = f", measured {memory['measured_ms']:.0f} ms" if memory.get("measured_ms") else ""
        lines.append(f"    a step predicted {memory['predicted_ms']:.0f} ms{took}")
    kept = [f"    frozen weights stay dequantised: {shown(memory['kept_weights'])}"] if memory["kept_weights"] else []
    return (
        lines
        + plan_lines(memory["plans"])
        + kept
        + ([f"    costs {memory['recompute_ms']:.1f} ms a step"] if memory["recompute_ms"] else [])
    )


def summarize(state: State) -> Report:
    """Make the report of what the backends of all regions recorded."""
    model, regions = state.model, state.compiled()
    layers = _layer_counts(model)
    made = [_region_report(region, layers.get(id(region), 1)) for region in regions]
    told = dict.fromkeys([*model_notes(state), *(each for region in regions for each in _region_notes(region))])
    notes = [each if isinstance(each, Note) else Note(each) for each in told]  # passes of other packages write strings
    return Report(type(model).__name__, made, state.matches(), notes, *_memory(state))


def _region_notes(region: Region) -> list[str]:
    contexts = [c for backend in region.backends.values() for c in backend.contexts]
    return [
        *region_notes(region),
        *(each for context in contexts for each in context.notes),
        *_not_reduced(region),
    ]


def _not_reduced(region: Region) -> list[Note]:
    """Note that nothing of the region runs in the precision that was requested."""
    return [
        note("region-not-in-precision", region.name, precision=c.precision)
        for c in contexts_of(region)
        if c.precision is not None and c.providers and not c.reduced
    ]  # without providers, all code came from a cache


def _region_report(region: Region, layers: int) -> RegionReport:
    training, pieces = contexts_of(region), pieces_of(region)
    reasons: dict[str, dict[str, None]] = {}
    for name, given in (item for c in pieces for item in c.reasons.items()):
        reasons.setdefault(name, {}).update(given)
    # compared by identity, not by `==`: sizes may be symbols
    saved = [saved_bytes(c.saved) for c in training if not any(c is piece for piece in pieces)]
    return RegionReport(
        name=region.name,
        layers=layers,
        compiles=sum(len(backend.contexts) for backend in region.backends.values()),
        recompiles=[reason for variant in region.variants.values() for reason in variant.recompiles],
        saved_bytes=[*saved, sum(saved_bytes(c.saved) for c in pieces)] if pieces else saved,
        providers=dict(sum((c.providers for c in pieces), Counter())),
        reasons={name: [reason for reason in given if reason] for name, given in reasons.items()},
        changes=[change for c in pieces for change in c.changes],
        breaks=[reason for variant in region.variants.values() for reason in variant.breaks],
        seconds=region.effort.seconds,
    )


def _memory(state: State) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """The plan and the step time of the first device, and those of the other devices."""
    planned = [plan for budget in state.step.budgets if (plan := budget.summary()) is not None]
    each = [plan["predicted_ms"] for plan in planned]
    step = {
        "predicted_ms": sum(each) if all(each) else None,
        "measured_ms": state.part(StepTelemetry).step_ms,
    }  # devices take turns
    planned = [plan | step for plan in planned]
    return (planned[0] if planned else None), planned[1:]


def _layer_counts(model: nn.Module) -> dict[int, int]:
    slots = [slot for m in model.modules() if (slot := slot_of(m)) is not None]
    return Counter(id(slot.region) for slot in slots if hasattr(slot, "region"))


def saved_bytes(saved: Sequence[tuple[str, Any]]) -> int:
    """The sum of the bytes of saved tensors. Symbolic sizes count by their hints."""
    return sum(size_hint(nbytes) for _, nbytes in saved)
