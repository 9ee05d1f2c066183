"""Ops to providers, on the forward and the backward graph. No file here names a model or an op family."""

from tunecompile.passes.lower.choose_provider import PASS as choose_provider
from tunecompile.passes.lower.cleanup import PASS as cleanup

__all__ = ["choose_provider", "cleanup"]
