"""Every error a user can meet: one class each, with a message template that names the cause and the mend."""

import torch


def summary(error: BaseException) -> str:
    """What kind of error it is, and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


class TunecompileError(Exception):
    """Base class. Subclasses fill `template` from keyword arguments."""

    template = "{message}"

    def __init__(self, **fields):
        self.fields = fields
        super().__init__(self.template.format(**fields))


class NotAModule(TunecompileError):
    template = "tunecompile.optimize needs a torch.nn.Module, got {type}. Pass the model object itself."


class NotOptimized(TunecompileError):
    template = "This {type} is not optimized. Call tunecompile.optimize(model) first, on this very object."


class UnknownPrecision(TunecompileError, ValueError):
    template = "precision is {given!r}: give None, to compute as the model does, or 'fp8'."


class InvalidOp(TunecompileError):
    template = "Op {name!r} cannot be registered: {reason}."


class NoSecondDerivative(TunecompileError, RuntimeError):
    template = "{name} has no derivative: gradients of gradients are not supported. Call tunecompile.restore(model) for such a loss."


class ModifiedInPlace(TunecompileError, RuntimeError):
    template = "One of the variables needed for gradient computation has been modified by an inplace operation: {what}, saved by layer {layer}."


class NothingFits(TunecompileError, torch.OutOfMemoryError):
    template = "CUDA out of memory. The step's smallest plan ({plan}) is short of {missing}. {help}"


class StepLost(TunecompileError, torch.OutOfMemoryError):
    template = ("CUDA out of memory. {missing} were missing, and the step cannot be repeated here: its layers {reason}. "
                "Leave this step out; the next one follows a plan that needs less: {plan}.")


class InvalidRewrite(TunecompileError):
    template = "Rewrite {name!r} is not valid: {reason}."


class NoSuchPass(TunecompileError, ValueError):
    template = "{given}: {reason}."


class InvalidPipeline(TunecompileError):
    template = "The pipeline is not valid: {reason}."


class InvalidPackage(TunecompileError):
    template = ("{package} brings passes that cannot be used: {reason}. Update the package or remove it, or leave it out: set the environment "
                "variable TUNECOMPILE_PASSES={others}.")


class UnknownEntryPoint(TunecompileError, ValueError):
    template = ("TUNECOMPILE_PASSES names {unknown}, which no installed package brings. Give names of entry points of the group tunecompile.passes, "
                "separated by commas, or none. Installed: {known}.")


class LeftoverOp(TunecompileError):
    template = "{ops} reached code generation without a provider. This is a fault of the pass that made them; please report it."


class UnknownBudget(TunecompileError, ValueError):
    template = "memory={given} is no budget. Give bytes (\"20GiB\", 20 * 2**30), a share of the GPU's memory (0.8), \"auto\" for all that is free, or None."


class BadBatchShape(TunecompileError, ValueError):
    template = "batch_shape is {given!r}: give (rows, length), two positive integers."


class CannotEstimate(TunecompileError):
    template = "No estimate for this {model}: {reason}."


class CannotVerify(TunecompileError):
    template = "This step cannot be verified: {reason}."


class NoPlan(TunecompileError):
    template = "There is no memory plan to show: {reason}."


class MissingExtra(TunecompileError):
    template = "{what} needs {package}, which is not installed. Install it: pip install 'tunecompile[{extra}]'"


class UnsafeFolder(TunecompileError):
    template = "{path} is not a folder that you alone can enter, so it is not used. Remove it, or set TMPDIR for monitor and training alike."
