"""What is decided on the joint graph: tags, and what the report says of providers. No file here names a model or an op family."""

from tunecompile.passes.plan.providers import PASS as providers
from tunecompile.passes.plan.remat import PASS as remat

__all__ = ["providers", "remat"]
