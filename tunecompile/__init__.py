"""tunecompile: faster, smaller and more exact fine-tuning, by compiling the training step.

    model = tunecompile.optimize(model)     # then any training loop, unchanged
    print(tunecompile.report(model))

For those who write kernels and passes: `tunecompile.op` says what an op promises, how its backward is declared and which provider runs;
`tunecompile.rewrite` how patterns are written, and `tunecompile.match` and `tunecompile.canonical` how they are found; `tunecompile.pipeline` what a
pass is; `tunecompile.passes` how one is written, seen, tested and measured; `tunecompile.templates` the same of a Triton kernel; `tunecompile.check`
asks whether it is right. `tunecompile.ops` has the meanings of all ops, `tunecompile.errors` all errors, and `tunecompile.plugins` says where the
passes of a package stand. What `report` and `verify` return is in `tunecompile.report` and `tunecompile.verify`.
"""

from tunecompile.api import optimize, report, restore
from tunecompile.check import Example, Finding, check
from tunecompile.drawing.explain import explain
from tunecompile.memory.estimate import Estimate, estimate
from tunecompile.memory.timeline import memory_timeline
from tunecompile.op import Cost, op
from tunecompile.pipeline import Pass
from tunecompile.rewrite import rewrite
from tunecompile.saving.folder import save_merged
from tunecompile.saving.gguf import save_gguf
from tunecompile.verify import Verification, verify

__version__ = "0.1.0"
__all__ = ["Cost", "Estimate", "Example", "Finding", "Pass", "Verification", "check", "estimate", "explain", "memory_timeline", "op", "optimize", "report", "restore", "rewrite", "save_gguf", "save_merged",
           "verify"]
