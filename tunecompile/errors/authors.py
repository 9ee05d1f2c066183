"""Errors for authors of ops, rewrites and passes."""

from __future__ import annotations

from tunecompile.errors.base import TunecompileError


class InvalidOp(TunecompileError):
    """Raised where an op, its backward or a provider is registered, so mostly on import."""

    template = "Op {name!r} cannot be registered: {reason}."


class InvalidRewrite(TunecompileError):
    """Raised where a rewrite is defined: its replacement uses a name that its pattern does not bind."""

    template = "Rewrite {name!r} is not valid: {reason}."


class InvalidPipeline(TunecompileError):
    """Raised by `compiler.pass_manager.validate`, which `optimize` calls: passes violate order or contracts."""

    template = "The pipeline is not valid: {reason}."


class LeftoverOp(TunecompileError):
    """Raised by the pass `cleanup` while a region is compiled: an op was not lowered.

    The region is then compiled without rewrites, with a warning.
    """

    template = (
        "{ops} reached code generation without a provider. "
        "This is a fault of the pass that made them; please report it."
    )


class NoSuchPass(TunecompileError, ValueError):
    """Raised by `tunecompile new-pass` and `check-pass`: no valid package name, or no passes or examples in it."""

    template = "{given}: {reason}."
