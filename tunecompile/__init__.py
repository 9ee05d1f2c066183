"""tunecompile: faster, smaller and more exact fine-tuning, by compiling the training step.

    model = tunecompile.optimize(model)     # then any training loop, unchanged
    print(tunecompile.report(model))
"""

from tunecompile.api import optimize, report, restore
from tunecompile.check import Example, Finding, check
from tunecompile.drawing.explain import explain
from tunecompile.memory.estimate import Estimate, estimate
from tunecompile.memory.timeline import memory_timeline
from tunecompile.op import Cost, op
from tunecompile.pipeline import Pass
from tunecompile.rewrite import rewrite
from tunecompile.verify import Verification, verify

__version__ = "0.1.0"
__all__ = ["Cost", "Estimate", "Example", "Finding", "Pass", "Verification", "check", "estimate", "explain", "memory_timeline", "op", "optimize", "report", "restore", "rewrite", "verify"]
