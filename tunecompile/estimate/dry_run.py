"""A training step that does not run: a skeleton of the model is called on fake tensors.

A skeleton has new modules around the same parameters. Fake tensors have shapes and no memory. Layers are surveyed by
the same passes as in a training step, the plan is solved by the same function, and blank results take the place of
code.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from tunecompile._torch.dynamo import static_shapes
from tunecompile._torch.fake_tensors import FakeTensorMode
from tunecompile._torch.modules import fill
from tunecompile.compiler.backend import CompiledAs
from tunecompile.compiler.survey import SurveyBackend
from tunecompile.errors import CannotEstimate, summary
from tunecompile.estimate.dry_run_planner import DryRunPlanner, SharedPrefix, StaticMemory
from tunecompile.estimate.meta_model import counted_tensors, meta_linears
from tunecompile.ir.op import has_triton
from tunecompile.ir.pretend_gpu import as_on_gpu
from tunecompile.notes import Note, note
from tunecompile.planner.datasheets import HOST, GpuSpec
from tunecompile.runtime.compile_limits import CompileEffort
from tunecompile.runtime.layers.dynamic_shapes import DynamicShapes, mark_flat, tensors_in
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.layers.region import Region
from tunecompile.runtime.layers.variant import Variant
from tunecompile.runtime.memory.offload import Offload
from tunecompile.runtime.model_state import State
from tunecompile.runtime.parts.kernel_functions import KernelFunctions
from tunecompile.runtime.step.rows_refused import RowsRefused
from tunecompile.runtime.unpad.decision import refused_now
from tunecompile.runtime.unpad.documents import windows_of
from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.handed_on import RowCall
from tunecompile.runtime.unpad.masks.given import mask_in
from tunecompile.runtime.unpad.masks.pairs import PairMask, identity

UNBOUNDED = 1 << 60  #: bytes


def _blank_results(fakes: FakeTensorMode, gm: GraphModule) -> Callable:
    """In the place of a graph's code: a function that returns blank results."""
    (returned,) = (node for node in gm.graph.nodes if node.op == "output")
    like = torch.fx.map_arg(returned.args[0], lambda node: node.meta["example_value"])
    return lambda *_: _blank(like, fakes)  # Dynamo keeps this for longer than the model may live


def _blank(like: Any, fakes: FakeTensorMode) -> Any:
    """Tensors of the same shapes."""

    def blank(tensor: Tensor) -> Tensor:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad
        )

    with fakes:
        return tree_map_only(Tensor, blank, like)


class TraceOnlySlot:
    """Takes the place of a skeleton's layer: the first of each kind is surveyed, the others return alike."""

    def __init__(
        self,
        slot: LayerSlot,
        planner: DryRunPlanner,
        fakes: FakeTensorMode,
        seen: dict[tuple, tuple[SurveyBackend, Variant, Any]],
    ):
        self.slot, self.planner, self.fakes, self.seen = slot, planner, fakes, seen
        self.padding = slot.padding

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.padding is not None:
            self.padding.begin_layers()
        args, kwargs, _ = self.slot.differentiable(args, kwargs)
        if (found := _as_documents(self.slot, args, kwargs)) is not None:
            flat, mask = found
            if (row := RowCall.of(flat, mask, args, kwargs, keep=False)) is not None:
                try:
                    output = self._survey(row.args, row.kwargs, flat=True)
                    row.hand_on(None, None)  # without a graph, nothing is refused
                    return flat.leave(output, keep=False)
                except RowsRefused:
                    pass  # the layer runs on the batch as it comes
        if (mask := mask_in(args, kwargs)) is not None:
            self.planner.masks[identity(mask)] = mask.numel() * mask.element_size()
            args, kwargs = tree_map_only(PairMask, lambda mask: _blank(mask, self.fakes), (args, kwargs))
        return self._survey(args, kwargs, flat=False)

    def _survey(self, args: tuple, kwargs: dict[str, Any], flat: bool) -> Any:
        tensors = list(tensors_in(args, kwargs))
        region, sizes = self.slot.region, DynamicShapes.of(tensors)
        if flat:  # the graph's number of tokens is a symbol, as in a training step: by it, this is known to be right
            mark_flat(tensors, sizes[1])
        self.planner.tokens = self.planner.tokens or math.prod(sizes)
        backend, variant, output = self.seen.get((id(region), sizes), (None, None, None))
        known = id(region) in self.planner.candidates  # if not: nothing in the layers before was trained
        if backend is not None and known:
            if any(isinstance(value, (dict, UserDict)) for value in (*args, *kwargs.values())):
                return variant.call(self.slot.layer, *args, **kwargs)  # it may write there what later layers read
            return _blank(output, self.fakes)
        backend = SurveyBackend(
            region.name,
            region.passes,
            "eager",
            region.precision,
            None if known else partial(self.planner.see, self.slot),
            partial(_blank_results, self.fakes),
        )
        alone = CompiledAs(object(), object())  # nothing that it compiles is another's
        effort = CompileEffort(region.name)
        variant = Variant(region.name, backend, effort, alone, flat, region.guards)  # Dynamo holds it weakly
        output = variant.call(self.slot.layer, *args, **kwargs)
        self.seen[id(region), sizes] = backend, variant, output
        return output

    def note_eager(self) -> None:
        raise RuntimeError("Dynamo cannot trace it")


def _as_documents(slot: LayerSlot, args: tuple, kwargs: dict[str, Any]) -> tuple[FlatBatch, Tensor] | None:
    """The batch as a row of documents, as a training step has it, and the mask that goes; None where it has no such.

    The mask is not read: rows are whole, and the layer's attributes tell its window.
    """
    mask, padding = mask_in(args, kwargs), slot.padding
    if mask is None or padding is None or refused_now(padding.owner) or padding.watch.reason():
        return None
    window = windows_of(slot.layer)[0]
    if window < 0 or not (window or mask.is_floating_point()):
        return None
    return FlatBatch.of_whole_rows(mask.shape[0], mask.shape[-1], window, mask.device), mask


def _apart_by_window(slots: Sequence[LayerSlot]) -> None:
    """Give layers whose windows differ regions of their own: attention takes them more or less time."""
    made: dict[tuple, Region] = {}
    first: dict[int, int] = {}
    for slot in slots:
        window = windows_of(slot.layer)[0]
        whole = first.setdefault(id(slot.region), window) == window
        if not whole:
            key = (id(slot.region), window)
            name = f"{slot.region.name}_window_{window or 'none'}"
            slot.region = made.setdefault(key, replace(slot.region, name=name, backends={}, variants={}))


def _blank_mask(model: nn.Module, ids: Tensor, fakes: FakeTensorMode) -> dict[str, Tensor]:
    """A mask to call a model of written-out attention with, which would make one itself: [T, T] may be too large."""
    config = getattr(model, "config", None)
    takes = "attention_mask" in inspect.signature(model.forward).parameters
    if (
        not takes
        or not _has_heads(type(getattr(config, "get_text_config", lambda: config)()))
        or getattr(config, "_attn_implementation", None) != "eager"
    ):
        return {}
    rows, length = ids.shape
    with fakes:
        dtype = getattr(model, "dtype", torch.float32)
        return {"attention_mask": torch.empty((rows, 1, length, length), dtype=dtype, device=ids.device)}


def _has_heads(config: type) -> bool:
    """Whether configs of a class have heads of attention. (Mamba's have none, and say "eager" of it, too.)"""
    known = {*dir(config), *inspect.signature(config.__init__).parameters, *getattr(config, "attribute_map", {})}
    return "num_attention_heads" in known


def _skeleton(model: nn.Module, fakes: FakeTensorMode) -> nn.Module:
    """New modules and buffers around the same parameters; on the meta device, around fakes of CPU tensors."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    stands = meta_linears(model)
    for tensor in counted_tensors(model, stands):
        if tensor.is_meta and type(tensor) not in (Tensor, nn.Parameter):
            raise CannotEstimate(
                model=type(model).__name__, reason=f"a {type(tensor).__name__} on the meta device is not quantised yet"
            )
        if tensor.is_meta:
            with fakes:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                memo[id(tensor)] = (
                    nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
                )
    try:
        memo |= {key: copy.deepcopy(module, memo) for key, module in stands.items()}
        return copy.deepcopy(model, memo).train()
    except Exception as error:
        raise CannotEstimate(
            model=type(model).__name__, reason=f"its modules cannot be copied: {summary(error)}"
        ) from error


def rehearse(
    stage: State,
    ledger: StaticMemory,
    device: torch.device,
    shape: Sequence[int],
    gpu: GpuSpec | None = None,
    thorough: bool = False,
    shared_prefix: int = 0,
) -> tuple[DryRunPlanner, list[Note]]:
    """Call a skeleton on a blank batch, with all that `optimize` attaches. Returns the planner and notes.

    shared_prefix: tokens that all rows begin with.

    Raises:
        CannotEstimate: the model cannot be copied, called or traced.
        BadSharedPrefix: rows are not longer than the prefix, or it is negative.
    """
    prefix = SharedPrefix(shared_prefix, shape[1])
    fakes, name, spec = FakeTensorMode(allow_non_fake_inputs=True), type(stage.model).__name__, stage.memory
    stage.model, stage.memory = _skeleton(stage.model, fakes), None
    stage.attach()
    _apart_by_window(stage.slots)
    stage.memory = UNBOUNDED  # what the user's checkpointing saves is planned, and no budget is made without a recovery
    cuda = device.type == "cuda"
    device = device if cuda else torch.device("cpu")
    rehearsal = _planner(stage, spec, ledger, device, gpu, thorough, prefix)
    seen: dict[tuple, tuple[SurveyBackend, Variant, Any]] = {}
    for slot in stage.slots:
        fill(slot.layer, TraceOnlySlot(slot, rehearsal, fakes, seen))
    for slot in stage.norms:
        fill(slot.layer, None)
    failure: Exception | None = None
    with fakes:
        ids = torch.empty(tuple(shape), dtype=torch.int64, device=device)
    try:
        with (
            torch.enable_grad(),
            torch.random.fork_rng([device] if cuda else []),
            static_shapes(),
            contextlib.nullcontext() if gpu is None else as_on_gpu(gpu.name),
        ):
            stage.model(
                ids, **_blank_mask(stage.model, ids, fakes)
            )  # outside the fakes' mode: positions are real numbers, and tell the model that nothing needs a dense mask
    except Exception as error:  # of what comes behind the layers, perhaps
        failure = error
    said = [*rehearsal.notes, *(said for backend, *_ in seen.values() for said in backend.failures)]
    left = list(
        {
            id(slot.region): slot.region.name for slot in stage.slots if id(slot.region) not in rehearsal.candidates
        }.values()
    )
    if rehearsal.admitted is None or (left and failure is not None):
        reasons = said or [summary(failure) if failure else "the model calls no layer that is trained"]
        raise CannotEstimate(model=name, reason=reasons[0]) from failure
    unfused = any(backend.attends for backend, *_ in seen.values()) and not rehearsal.attends
    absent = []
    if not cuda and (gpu is None or not has_triton()):
        absent = [note("traced-on-cpu" if gpu is None else "estimated-without-triton")]
    return rehearsal, [
        *said,
        *stage.part(KernelFunctions).notes(stage),
        *(note("region-not-called", region) for region in left),
        *([note("attention-not-fused")] if unfused else []),
        *absent,
    ]


def _planner(
    stage: State,
    spec: Any,
    ledger: StaticMemory,
    device: torch.device,
    gpu: GpuSpec | None,
    thorough: bool,
    prefix: SharedPrefix,
) -> DryRunPlanner:
    """The planner of a step's budget; without a budget, one that bounds nothing but knows the device's bytes."""
    bounded, somewhere = spec is not None, device.type == "cuda" or gpu is not None
    host = HOST if stage.settings.host_bytes is None and gpu is not None else stage.settings.host_bytes
    offload = Offload(device, host, stage.settings.offload_dir) if somewhere and bounded and host != 0 else None
    keepable = somewhere and bounded and stage.precision is None
    return DryRunPlanner(
        spec if bounded else "auto" if somewhere else UNBOUNDED,
        stage.model,
        ledger,
        device,
        stage.slots,
        stage.heads,
        offload,
        gpu,
        bounded,
        keepable=keepable,
        thorough=thorough,
        prefix=prefix,
    )
