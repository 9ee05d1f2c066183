"""tunecompile: faster, smaller and more exact fine-tuning, by compiling the training step.

    model = tunecompile.optimize(model)     # then any training loop, unchanged
    print(tunecompile.report(model))

For those who write kernels and passes: `tunecompile.op` says what an op promises, how its backward is declared and which provider runs;
`tunecompile.rewrite` how patterns are written, and `tunecompile.ir.match` and `tunecompile.ir.canonicalize` how they are found; `tunecompile.compiler.pass_manager` what a
pass is; `tunecompile.passes` how one is written, seen, tested and measured; `tunecompile.templates` the same of a Triton kernel; `tunecompile.check`
asks whether it is right. `tunecompile.ops` has the meanings of all ops, `tunecompile.errors` all errors, and `tunecompile.compiler.plugins` says where the
passes of a package stand. What `report` and `verify` return is in `tunecompile.report` and `tunecompile.verify`.
"""

from tunecompile.api import optimize, report, restore
from tunecompile.compiler.pass_manager import Context, Pass, recognize
from tunecompile.estimate.estimate import Estimate, estimate
from tunecompile.export.gguf import save_gguf
from tunecompile.export.safetensors import save_merged
from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.ir.rewrite import rewrite
from tunecompile.planner.liveness import tensor_bytes
from tunecompile.report.explain import explain
from tunecompile.report.memory_timeline import memory_timeline
from tunecompile.verification.check_pass import Example, Finding, check, compiled
from tunecompile.verification.verify import Verification, verify

__version__ = "0.1.0"
__all__ = [
    "Context",
    "Cost",
    "Estimate",
    "Example",
    "Finding",
    "Pass",
    "Verification",
    "check",
    "compiled",
    "estimate",
    "explain",
    "memory_timeline",
    "op",
    "optimize",
    "recognize",
    "refuse_gpu",
    "report",
    "restore",
    "rewrite",
    "save_gguf",
    "save_merged",
    "tensor_bytes",
    "verify",
]
