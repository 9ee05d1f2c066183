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
from tunecompile.planner.device_memory import HostGauge, Spec, budget_bytes, host_budget_bytes
from tunecompile.report.report import Report, summarize
from tunecompile.runtime.attach import attach, restore
from tunecompile.runtime.model_state import Precision, Settings, give_back, is_optimized, state_of
from tunecompile.verification import verify as verification

__all__ = ["free", "optimize", "report", "restore"]


def optimize(
    model: nn.Module,
    *,
    memory: Spec = None,
    host_memory: Spec = None,
    offload_dir: str | os.PathLike | None = None,
    host_embedding: bool = False,
    precision: Precision | None = None,
    verify: bool = False,
    generate: bool = True,
    executor: Executor = "inductor",
) -> nn.Module:
    """Compile the training step of `model` in place and return the same object.

    Works with any training loop: call it once, before or after adapters are added, and train as usual. Evaluation,
    `generate()`, saving and loading are called as before. Nothing is compiled until the first training step. Code that
    cannot be compiled runs as before, and `tunecompile.report(model)` says why. A second call changes nothing.

    Args:
        model: any `nn.Module`. Repeated decoder layers are compiled once for all of them; a model without repeated
            layers is compiled as a whole.
        memory: GPU memory that the training step may use: bytes ("20GiB", 20 * 2**30), a fraction of the GPU's memory
            (0.8), or "auto" for all that is free. If the step needs more, as few layers as possible recompute
            activations in their backward pass (those that free the most bytes per millisecond), or compute their MLP in
            tiles. If memory is left, frozen weights under adapters are kept in the layout that matrix products read.
            The plan is made again when the batch grows or memory runs out. It replaces the model's own gradient
            checkpointing, with the same results. None: each layer saves what is expensive to recompute; if the model's
            own checkpointing is on for all layers, the budget is what that would need. On a CPU the budget limits what
            layers save for the backward pass. For layers on several GPUs (`device_map`) each GPU gets this budget and
            its own plan. torch's `expandable_segments` are turned on, without a budget at the second size of a batch,
            unless PYTORCH_ALLOC_CONF is set.
        host_memory: bytes of pinned host memory for activations that are offloaded under a budget, where copies are
            cheaper than recomputation. None: half of what is available; 0: none.
        offload_dir: folder for activations that do not fit in host memory. Each file is removed with its tensor.
        host_embedding: whether frozen embedding tables are kept in pinned host memory, from which the GPU reads the
            rows it needs: 1 GiB less for an 8B model, for a millisecond a step of 8,192 tokens. All users still see
            them as tensors of the GPU. A table that is trained or shared (for example with the head) is not moved, and
            the report says so.
        precision: None computes as the model does. "fp8" multiplies by the frozen weights under LoRA adapters in 8-bit
            floating point (e4m3), if the GPU has compute capability 8.9, 9.0 or 10.0 and activations are bf16; "int8"
            in 8-bit integers, on any GPU from 7.5 on and for fp16, too; "8bit" in FP8 where that runs, else in INT8.
            These matrix products take nearly half the time, and each result has an error of a few per cent. Adapters,
            attention, norms, other linears, head and loss keep their precision. `tunecompile.report(model)` says what
            could not run in 8 bits, and `tunecompile compare --systems eager,tunecompile,tunecompile-fp8` (or
            tunecompile-int8) compares the loss curves.
        verify: whether the first training step is checked as `tunecompile.verify` does, by three runs, before it is
            taken. A rewrite that makes gradients wrong is disabled for this model, with a warning, and the report has
            the result. The model itself has to compute the loss. Each of several ranks verifies its own batch, and
            every rank's report covers all of them.
        generate: whether `model.generate` of transformers records the step that makes one token of each row as a CUDA
            graph, with the keys in memory of a fixed size. Greedy search and sampling run so, for any model whose
            cache can be of a fixed size; the rest runs as before, and the report says why.
        executor: "inductor" generates code; "eager" runs the rewritten graphs op by op, to distinguish a fault of a
            pass from a fault of code generation. Op by op a buffer that a layer updates (BatchNorm's) is updated once
            in a checkpoint of yours that is not re-entrant; generated code does it twice, as the model itself.

    The environment variable TUNECOMPILE=0 turns this function into a no-op. TUNECOMPILE_DUMP=folder writes the graphs
    after each pass to that folder. Installed packages may provide their own passes (the entry-point group
    `tunecompile.passes`): TUNECOMPILE_PASSES names the ones to use, separated by commas, or none; if it is not set, all
    are used.

    Returns:
        `model` itself.

    Raises:
        NotAModule: `model` is not an `nn.Module`.
        UnknownPrecision: `precision` is neither None nor "fp8", "int8" or "8bit".
        UnknownBudget: `memory` or `host_memory` is none of the forms above.
        InvalidPackage: passes of an installed package cannot be used; the message says why, and how to disable them.
        UnknownEntryPoint: TUNECOMPILE_PASSES names an entry point that is not installed.
    """
    if not isinstance(model, nn.Module):
        raise NotAModule(type=type(model).__name__)
    if precision not in (None, *get_args(Precision)):
        raise UnknownPrecision(given=precision)
    budget_bytes(memory, HostGauge())  # raises here for an invalid budget, not in the first step
    host_bytes = host_budget_bytes(host_memory)
    if os.environ.get("TUNECOMPILE") == "0":
        return model
    settings = Settings(
        () if is_optimized(model) else pipeline(own_passes.PIPELINE),  # installed packages are loaded once
        executor,
        precision,
        memory,
        host_bytes,
        Path(offload_dir) if offload_dir is not None else None,
        host_embedding,
        generate,
        verification.verify if verify else None,
    )
    return attach(model, settings)


def report(model: nn.Module) -> Report:
    """Return what was found, rewritten and refused in `model`, and why. The first training step fills it.

    Args:
        model: a model that was given to `optimize`.

    Returns:
        A `Report` with matches, providers, bytes that a layer saves, and notes. Print it, or read it with `to_dict()`.

    Raises:
        NotOptimized: `model` is not the object that was optimized.
    """
    return summarize(state_of(model))


def free(model: nn.Module) -> int:
    """Give back the GPU memory that is held from step to step, for others that run until the next one.

    Others are a rollout engine that wakes up, for example, an evaluation, or another model. Held are the memory of CUDA
    graphs, frozen weights in the layout of matrix products, and unused blocks of torch's allocator. The next steps make
    them again: numbers stay the same, and a step takes longer until its launches are recorded (three steps). A backward
    that is still to come keeps what it needs. Under `memory=`, the next step is planned with the memory that is there
    then.

    Args:
        model: a model that was given to `optimize`.

    Returns:
        Bytes that the process gave back to its GPUs.

    Raises:
        NotOptimized: `model` is not the object that was optimized.
    """
    return give_back(state_of(model))
