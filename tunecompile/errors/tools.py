"""Errors of `estimate`, `verify`, `memory_timeline`, `save_merged`, `save_gguf`, `quantize_experts`, of commands."""

from __future__ import annotations

from tunecompile.errors.base import TunecompileError


class BadBatchShape(TunecompileError, ValueError):
    """Raised by `estimate`: the shape is not (rows, tokens a row)."""

    template = "batch_shape is {given!r}: give (rows, length), two positive integers."


class BadSharedPrefix(TunecompileError, ValueError):
    """Raised by `estimate` and `tunecompile plan`: rows are not longer than the prefix that they are said to share."""

    template = "shared_prefix is {given}: give 0, or fewer tokens than a row has, {length}."


class UnknownGpu(TunecompileError, ValueError):
    """Raised by `estimate(gpu=...)` and `tunecompile plan`: the GPU's name or one of the given figures is unknown."""

    template = 'gpu={given!r}: {reason}. Known are {known}; figures that differ follow the name: "h100,memory=94GiB".'


class CannotEstimate(TunecompileError):
    """Raised by `estimate`: nothing is trained, the model spans several devices, or it cannot be traced or copied."""

    template = "No estimate for this {model}: {reason}."


class NoConfig(TunecompileError):
    """Raised by `tunecompile plan`: there is no config to build a model from, or transformers cannot read it."""

    template = "There is no config for {model!r}: {reason}. {mend}"


class CannotVerify(TunecompileError):
    """Raised by `verify`: nothing is trained, the step cannot be run three times, or it has no loss."""

    template = "This step cannot be verified: {reason}."


class NoPlan(TunecompileError):
    """Raised by `memory_timeline`: there is no budget, or no training step has run under it."""

    template = "There is no memory plan to show: {reason}."


class CannotMerge(TunecompileError):
    """Raised by `save_merged` and `tunecompile merge`: no weights can represent this model, or cannot be written.

    The reason says what to do instead.
    """

    template = "This model cannot be merged: {reason}."


class CannotQuantize(TunecompileError, ValueError):
    """Raised by `quantize_experts`: the model has no expert stacks, or one that bitsandbytes cannot quantise."""

    template = "The experts of this model cannot be quantised: {reason}."


class NoAdapter(TunecompileError):
    """Raised by `tunecompile merge`: there is no adapter, its base cannot be loaded, or the two do not fit."""

    template = "The adapter at {path} cannot be merged: {reason}."


class CannotWriteGguf(TunecompileError):
    """Raised by `save_gguf` and `tunecompile merge --gguf`: no known GGUF form of this model or tokenizer."""

    template = "{path} cannot be written as GGUF: {reason}."


class UnsafeFolder(TunecompileError):
    """Raised by `tunecompile monitor`: the telemetry folder is a link, open to others, or owned by another user."""

    template = (
        "{path} is not a folder that only you can enter, so it is not used. Remove it, or set TMPDIR for monitor and "
        "training alike."
    )
