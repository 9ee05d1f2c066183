"""Every error a user can meet: one class each, with a message template that names the cause and the mend."""

import torch

__all__ = [
    "BadBatchShape",
    "CannotEstimate",
    "CannotMerge",
    "CannotVerify",
    "CannotWriteGguf",
    "InvalidOp",
    "InvalidPackage",
    "InvalidPipeline",
    "InvalidRewrite",
    "LayerChanged",
    "LeftoverOp",
    "MissingExtra",
    "ModifiedInPlace",
    "NoAdapter",
    "NoConfig",
    "NoGradient",
    "NoPlan",
    "NoSecondDerivative",
    "NoSuchPass",
    "NotAModule",
    "NotOptimized",
    "NothingFits",
    "RankLost",
    "StepLost",
    "TunecompileError",
    "UnknownBudget",
    "UnknownEntryPoint",
    "UnknownGpu",
    "UnknownPrecision",
    "UnsafeFolder",
    "summary",
]


def summary(error: BaseException) -> str:
    """An error in a line, for notes and reports.

    Args:
        error: any exception.

    Returns:
        Its class, and 300 characters at most of the first line of what it says.
    """
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


class TunecompileError(Exception):
    """Base class of all errors below.

    Args:
        fields: what fills the `template` of a subclass, by name. They stay readable as `error.fields`.
    """

    template = "{message}"

    def __init__(self, **fields):
        self.fields = fields
        super().__init__(self.template.format(**fields))


class NotAModule(TunecompileError):
    """By `tunecompile.optimize`: it was given something else than a module, such as its weights."""

    template = "tunecompile.optimize needs a torch.nn.Module, got {type}. Pass the model object itself."


class NotOptimized(TunecompileError):
    """By `restore`, `report` and `memory_timeline`: the model is another object than the one that was optimized."""

    template = "This {type} is not optimized. Call tunecompile.optimize(model) first, on this very object."


class UnknownPrecision(TunecompileError, ValueError):
    """By `optimize(precision=...)`."""

    template = "precision is {given!r}: give None, to compute as the model does, or 'fp8'."


class InvalidOp(TunecompileError):
    """Where an op, its backward or a provider is registered, so mostly on import."""

    template = "Op {name!r} cannot be registered: {reason}."


class NoSecondDerivative(TunecompileError, RuntimeError):
    """In a backward pass with `create_graph=True`, by an op's backward, or by a model under a memory budget."""

    template = "{name} has no derivative: gradients of gradients are not supported. Call tunecompile.restore(model) for such a loss."


class NoGradient(TunecompileError, RuntimeError):
    """Where the gradient at a training step's logits is asked for (by a hook, `retain_grad` or `torch.autograd.grad`), and the loss was computed without
    making them. Mostly in that loss's backward pass."""

    template = (
        "{asked} asks for the gradient at logits, where none arrives: {reason}. Have them made first: call the model without labels, call "
        "logits.retain_grad() on what it returns before anything else, and compute the loss from these logits. Or call tunecompile.restore(model)."
    )


class ModifiedInPlace(TunecompileError, RuntimeError):
    """In a backward pass under a memory budget: a tensor that it needs was changed since the forward pass. What torch says of it without one."""

    template = "One of the variables needed for gradient computation has been modified by an inplace operation: {what}, saved by layer {layer}."


class LayerChanged(TunecompileError, RuntimeError):
    """In a backward pass under a memory budget: memory ran out, and a layer cannot be computed again as it was in the forward pass."""

    template = (
        "Memory ran out, and {layer} had to be computed again for its backward pass, but since its forward pass {what}. Change a model (adapters, eval()) "
        "before a step's forward pass or after its backward pass, not in between, and call one by torch.func.functional_call without memory=."
    )


class NothingFits(TunecompileError, torch.OutOfMemoryError):
    """In a training step under a memory budget: also the plan that needs least memory was short of it. It says how much, and what would help most."""

    template = "CUDA out of memory. The step's smallest plan ({plan}) is short of {missing}. {help}"


class StepLost(TunecompileError, torch.OutOfMemoryError):
    """In a training step under a memory budget that ran out of memory, and that one process cannot repeat (ZeRO, and FSDP between its layers). The next step has a new plan."""

    template = (
        "CUDA out of memory. {missing} were missing, and the step cannot be repeated here: its layers {reason}. "
        "Leave this step out; the next one follows a plan that needs less: {plan}."
    )


class RankLost(TunecompileError):
    """In the same place, where the other processes are there: they wait for this one in the middle of the step. No `torch.OutOfMemoryError`, since a loop
    that leaves such steps out would go on alone, and what it sends would be taken for parts of the step that the others are in."""

    template = (
        "Rank {rank} of {ranks} ran out of memory. {missing} were missing, and the step cannot be repeated here: its layers {reason}, and these wait for this "
        "one. Let the run end (torchrun ends the others), and resume it from its last checkpoint with memory={less!r} or a smaller batch."
    )


class InvalidRewrite(TunecompileError):
    """Where a rewrite is made: its replacement takes what its pattern does not bind."""

    template = "Rewrite {name!r} is not valid: {reason}."


class NoSuchPass(TunecompileError, ValueError):
    """By `tunecompile new-pass` and `check-pass`: the name cannot be a package's, or the package has no passes or no examples."""

    template = "{given}: {reason}."


class InvalidPipeline(TunecompileError):
    """By `tunecompile.compiler.pass_manager.validate`, which `optimize` calls: the order or the contracts of tunecompile's own passes do not hold."""

    template = "The pipeline is not valid: {reason}."


class InvalidPackage(TunecompileError):
    """By `optimize` and `estimate`: passes of an installed package cannot be loaded, or their contracts do not hold."""

    template = (
        "{package} brings passes that cannot be used: {reason}. Update the package or remove it, or leave it out: set the environment "
        "variable TUNECOMPILE_PASSES={others}."
    )


class UnknownEntryPoint(TunecompileError, ValueError):
    """By `optimize` and `estimate`, of the environment variable TUNECOMPILE_PASSES."""

    template = (
        "TUNECOMPILE_PASSES names {unknown}, which no installed package brings. Give names of entry points of the group tunecompile.passes, "
        "separated by commas, or none. Installed: {known}."
    )


class LeftoverOp(TunecompileError):
    """While a region is compiled, by the pass `cleanup`: an op was not lowered. The region is then compiled without rewrites, with a warning."""

    template = "{ops} reached code generation without a provider. This is a fault of the pass that made them; please report it."


class UnknownBudget(TunecompileError, ValueError):
    """By `optimize` and `estimate`: `memory` or `host_memory` is no positive amount of bytes, no share and not "auto"."""

    template = 'memory={given} is no budget. Give bytes ("20GiB", 20 * 2**30), a share of the GPU\'s memory (0.8), "auto" for all that is free, or None.'


class UnknownGpu(TunecompileError, ValueError):
    """By `estimate(gpu=...)` and `tunecompile plan`: no datasheet is known by that name, or one of the user's own cannot be read."""

    template = 'gpu={given!r}: {reason}. Known are {known}; figures that differ follow the name: "h100,memory=94GiB".'


class BadBatchShape(TunecompileError, ValueError):
    """By `estimate`: the shape is not (rows, tokens a row)."""

    template = "batch_shape is {given!r}: give (rows, length), two positive integers."


class CannotEstimate(TunecompileError):
    """By `estimate`: nothing is trained, the model is spread over devices, or it cannot be traced or copied."""

    template = "No estimate for this {model}: {reason}."


class CannotVerify(TunecompileError):
    """By `verify`: nothing is trained, or the step cannot be taken three times, or has no loss."""

    template = "This step cannot be verified: {reason}."


class CannotMerge(TunecompileError):
    """By `save_merged` and `tunecompile merge`: no weights can stand for this model, or they cannot be written there. The message says what to do instead."""

    template = "This model cannot be merged: {reason}."


class CannotWriteGguf(TunecompileError):
    """By `save_gguf` and `tunecompile merge --gguf`: of this model or tokenizer it is not known here how llama.cpp reads it."""

    template = "{path} cannot be written as GGUF: {reason}."


class NoAdapter(TunecompileError):
    """By `tunecompile merge`: the folder has no adapter, or its base cannot be loaded, or the two do not fit."""

    template = "The adapter at {path} cannot be merged: {reason}."


class NoConfig(TunecompileError):
    """By `tunecompile plan`: there is no config to build a model from, or transformers cannot read it."""

    template = "There is no config for {model!r}: {reason}. {mend}"


class NoPlan(TunecompileError):
    """By `memory_timeline`: there is no budget, or no training step has run under it."""

    template = "There is no memory plan to show: {reason}."


class MissingExtra(TunecompileError):
    """By what needs an optional package that is not installed. The message names the extra to install."""

    template = "{what} needs {package}, which is not installed. Install it: pip install 'tunecompile[{extra}]'"


class UnsafeFolder(TunecompileError):
    """By `tunecompile monitor`: the folder in which trainings leave their figures belongs to somebody else, is open to others, or is a link."""

    template = "{path} is not a folder that you alone can enter, so it is not used. Remove it, or set TMPDIR for monitor and training alike."
