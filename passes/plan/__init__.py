"""Tags on the joint graph: what is saved and what is recomputed. No file here names a model or an op family."""

from tunecompile.passes.plan.remat import PASS as remat

__all__ = ["remat"]
