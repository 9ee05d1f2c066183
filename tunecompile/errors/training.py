"""Errors of `optimize`, `restore`, `report`, and of the training steps of an optimized model."""

from __future__ import annotations

import torch

from tunecompile.errors.base import TunecompileError


class NotAModule(TunecompileError):
    """Raised by `optimize`: the argument is not a module, but for example its weights."""

    template = "tunecompile.optimize needs a torch.nn.Module, got {type}. Pass the model object itself."


class NotOptimized(TunecompileError):
    """Raised by `restore`, `report` and `memory_timeline`: the model is not the object that was optimized."""

    template = "This {type} is not optimized. Call tunecompile.optimize(model) first, on this very object."


class HostOptions(TunecompileError, ValueError):
    """Raised by a plugin of `tunecompile.trainers`: the host is to replace code that tunecompile compiles."""

    template = (
        "These options of {host} replace code that tunecompile compiles: {options}. Switch them off, or leave "
        "tunecompile's plugin out."
    )


class HostTooOld(TunecompileError):
    """Raised by the callbacks and plugins of `tunecompile.trainers`: the host lacks what they use."""

    template = (
        "This door needs {package} {oldest} or newer, and {installed} is installed. Update it, or call "
        "tunecompile.optimize(model) in your own code."
    )


class UnknownAttention(TunecompileError, ValueError):
    """Raised by attention that transformers calls by the name `tunecompile`."""

    template = (
        "Attention by the name tunecompile does not know what {kind} gives it: {given}. Load the model with another "
        "attn_implementation."
    )


class UnknownPrecision(TunecompileError, ValueError):
    """Raised by `optimize(precision=...)`."""

    template = (
        "precision is {given!r}: give None, to compute as the model does, 'fp8', 'int8', or '8bit' for what the GPU "
        "has of the two."
    )


class UnknownBudget(TunecompileError, ValueError):
    """Raised by `optimize` and `estimate`: `memory` or `host_memory` is no number of bytes, no fraction, not "auto"."""

    template = (
        'memory={given} is no budget. Give bytes ("20GiB", 20 * 2**30), a fraction of the GPU\'s memory (0.8), '
        '"auto" for all that is free, or None.'
    )


class InvalidPackage(TunecompileError):
    """Raised by `optimize` and `estimate`: passes of an installed package fail to load, or violate their contracts."""

    template = (
        "{package} brings passes that cannot be used: {reason}. Update the package or remove it, or disable it: set "
        "the environment variable TUNECOMPILE_PASSES={others}."
    )


class UnknownEntryPoint(TunecompileError, ValueError):
    """Raised by `optimize` and `estimate`: the environment variable TUNECOMPILE_PASSES has an unknown name."""

    template = (
        "TUNECOMPILE_PASSES names {unknown}, which no installed package provides. Give names of entry points of the "
        "group tunecompile.passes, separated by commas, or none. Installed: {known}."
    )


class NoSecondDerivative(TunecompileError, RuntimeError):
    """Raised in a backward pass with `create_graph=True`, by an op's backward or a model under a memory budget."""

    template = (
        "{name} has no derivative: gradients of gradients are not supported. "
        "Call tunecompile.restore(model) for such a loss."
    )


class NoGradient(TunecompileError, RuntimeError):
    """Raised when the gradient at a training step's logits is requested, but the loss was computed without logits.

    A hook, `retain_grad` or `torch.autograd.grad` requests it. The error is raised mostly in the loss's backward pass.
    """

    template = (
        "{asked} requests the gradient at logits, where none arrives: {reason}. Compute the logits first: call the "
        "model without labels, call logits.retain_grad() on its output before any other use, and compute the loss "
        "from these logits. Or call tunecompile.restore(model)."
    )


class ModifiedInPlace(TunecompileError, RuntimeError):
    """Raised in a backward pass under a memory budget: a saved tensor was modified since the forward pass.

    Without a budget torch raises its own error, which begins with the same sentence.
    """

    template = (
        "One of the variables needed for gradient computation has been modified by an inplace operation: {what}, "
        "saved by layer {layer}."
    )


class LayerChanged(TunecompileError, RuntimeError):
    """Raised in a backward pass under a memory budget: memory ran out, and a layer cannot be recomputed.

    The layer differs from the one that ran in the forward pass.
    """

    template = (
        "Memory ran out, and {layer} had to be recomputed for its backward pass, but since its forward pass {what}. "
        "Change a model (adapters, eval()) before a step's forward pass or after its backward pass, not in between, "
        "and call a model by torch.func.functional_call without memory=."
    )


class NothingFits(TunecompileError, torch.OutOfMemoryError):
    """Raised in a training step under a memory budget: the plan that needs least memory does not fit either.

    The message says how many bytes are missing, and which change would help most.
    """

    template = "CUDA out of memory. The step's smallest plan ({plan}) is short of {missing}. {help}"


class StepLost(TunecompileError, torch.OutOfMemoryError):
    """Raised in a training step under a memory budget that ran out of memory and cannot be repeated by one process.

    ZeRO is such a case, and FSDP between its layers. The next step has a new plan.
    """

    template = (
        "CUDA out of memory. {missing} were missing, and the step cannot be repeated here: its layers {reason}. "
        "Skip this step; the next one follows a plan that needs less: {plan}."
    )


class RankLost(TunecompileError):
    """Raised in place of `StepLost` if other processes exist: they wait for this one in the middle of the step.

    This is no `torch.OutOfMemoryError`: a loop that skips such steps would go on alone, and its messages would be
    taken for parts of the step that the other processes are in.
    """

    template = (
        "Rank {rank} of {ranks} ran out of memory. {missing} were missing, and the step cannot be repeated here: its "
        "layers {reason}, and these wait for this one. Let the run end (torchrun ends the others), and resume it from "
        "its last checkpoint with memory={less!r} or a smaller batch."
    )
