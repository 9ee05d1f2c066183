"""`optimize`, `restore`, `report`: the public functions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

from torch import nn

from tunecompile import passes as own_passes
from tunecompile.compiler.backend import Executor
from tunecompile.compiler.plugins import pipeline
from tunecompile.errors import NotAModule, UnknownPrecision
from tunecompile.planner.device_memory import HostGauge, Spec, budget_bytes
from tunecompile.report.report import Report, summarize
from tunecompile.runtime.attach import attach, restore
from tunecompile.runtime.model_state import Precision, is_optimized, state_of
from tunecompile.verification import verify as verification

__all__ = ["optimize", "report", "restore"]


def optimize(
    model: nn.Module,
    *,
    memory: Spec = None,
    host_memory: Spec = None,
    offload_dir: str | os.PathLike | None = None,
    host_embedding: bool = False,
    precision: Precision | None = None,
    verify: bool = False,
    executor: Executor = "inductor",
) -> nn.Module:
    """Compile the training step of `model` in place and return the same object.

    Works with any loop: call it once, after adapters were added or before, and train as usual. Evaluation, `generate()`,
    saving and loading are untouched. Nothing is compiled until the first training step. What cannot be compiled runs as it
    did, and `tunecompile.report(model)` says why. Calling it twice changes nothing.

    Args:
        model: any `nn.Module`; repeated decoder layers are compiled once for all of them, a model without them as a whole.
        memory: what the training step may hold on the GPU: bytes ("20GiB", 20 * 2**30), a share of the GPU's memory (0.8), or "auto" for
            all that is free. Where the step would need more, layers compute again in their backward pass what frees most bytes
            a millisecond, as few layers as will do, or compute their MLP in pieces; where there is room to spare, frozen weights
            under adapters stay as matrix products read them. The plan is looked at again when the batch grows or memory runs
            out. It takes the place of the model's own gradient checkpointing, with the same results. None: each layer keeps
            what is dear to compute, or nothing where the model's own checkpointing is on. On a CPU a budget bounds what layers
            hold for the backward pass. Of layers on several GPUs (`device_map`) each GPU gets this budget and a plan of its own. A budget
            turns on torch's `expandable_segments`, unless PYTORCH_ALLOC_CONF says anything.
        host_memory: bytes of pinned host memory that may hold saved activations under a budget, where copies are cheaper than computing
            again; None for half of what is available, 0 for none.
        offload_dir: folder for activations that host memory cannot hold; files are removed as soon as their tensors are.
        host_embedding: whether frozen embedding tables lie in pinned host memory, from which the GPU reads the rows it needs: 1 GiB less of an
            8B model, for a millisecond a step of 8,192 tokens. They stay tensors of the GPU for everybody who reads them. A table that is
            trained or shared (with the head, say) stays where it is, and the report says so.
        precision: None computes as the model does. "fp8" multiplies by the frozen weights under LoRA adapters in 8-bit floating
            point (e4m3), where the GPU has compute capability 8.9, 9.0 or 10.0 and activations are bf16: nearly half of the
            matrix products' time, for results that are off by a few per cent each. Adapters keep their precision; attention,
            norms, other linears, head and loss stay as they are. `tunecompile.report(model)` says what could not run in it,
            and `tunecompile compare --systems eager,tunecompile,tunecompile-fp8` shows the loss curves beside each other.
        verify: whether the first training step is taken three ways before it is taken for good, as `tunecompile.verify` does: a rewrite that makes
            gradients wrong is switched off for this model, with a warning, and the report tells the outcome. The loss has to be the model's own.
            Of several ranks each verifies its own batch, and every rank's report tells of all.
        executor: "inductor" generates code; "eager" runs the rewritten graphs op by op, to tell a fault of a pass from one
            of code generation.

    The environment variable TUNECOMPILE=0 turns this function into a no-op; TUNECOMPILE_DUMP=folder writes there what each pass makes of each graph.
    Installed packages may bring passes of their own (the entry-point group `tunecompile.passes`): TUNECOMPILE_PASSES names those to use,
    separated by commas, or none; all are used where it is not set.

    Returns:
        `model` itself.

    Raises:
        NotAModule: `model` is not an `nn.Module`.
        UnknownPrecision: `precision` is neither None nor "fp8".
        UnknownBudget: `memory` or `host_memory` is none of the forms above.
        InvalidPackage: passes of an installed package cannot be used; the message says why, and how to leave them out.
        UnknownEntryPoint: TUNECOMPILE_PASSES names what is not installed.
    """
    if not isinstance(model, nn.Module):
        raise NotAModule(type=type(model).__name__)
    if precision not in (None, *get_args(Precision)):
        raise UnknownPrecision(given=precision)
    budget_bytes(memory, HostGauge())  # a wrong one is told here, not in the first step
    host_bytes = 0 if host_memory == 0 else budget_bytes(host_memory, HostGauge())
    if os.environ.get("TUNECOMPILE") == "0" or is_optimized(model):
        return model  # before passes of installed packages are looked for
    return attach(
        model,
        pipeline(own_passes.PIPELINE),
        executor=executor,
        precision=precision,
        memory=memory,
        host_bytes=host_bytes,
        offload_dir=Path(offload_dir) if offload_dir is not None else None,
        host_embedding=host_embedding,
        verify=verification.verify if verify else None,
    )


def report(model: nn.Module) -> Report:
    """What was found, rewritten and refused, and why. Filled by the first training step.

    Args:
        model: that was optimized.

    Returns:
        A `tunecompile.report.Report`, to be printed, or read by `to_dict()`: matches, providers, bytes that a layer saves, notes.

    Raises:
        NotOptimized: `model` is not the object that was optimized.
    """
    return summarize(state_of(model))
