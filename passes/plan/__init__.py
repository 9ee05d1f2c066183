"""What is decided on the joint graph: tags, pieces, and what the report says of providers. No file here names a model or an op family."""

from tunecompile.passes.plan.providers import PASS as providers
from tunecompile.passes.plan.remat import PASS as remat
from tunecompile.passes.plan.tile import PASS as tile

__all__ = ["providers", "remat", "tile"]
