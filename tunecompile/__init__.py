"""tunecompile: faster, smaller and more exact fine-tuning, by compiling the training step.

    model = tunecompile.optimize(model)     # then any training loop, unchanged
    print(tunecompile.report(model))

For authors of kernels and passes:

- `tunecompile.op` documents ops: their contract, how to declare the backward, and how a provider is chosen.
- `tunecompile.rewrite` documents patterns; `tunecompile.ir.match` and `tunecompile.ir.canonicalize` how they match.
- `tunecompile.compiler.pass_manager` documents passes, and `tunecompile.passes` how to write, inspect, test and measure
  one; `tunecompile.templates` does the same for Triton kernels.
- `tunecompile.check` checks a pass. `tunecompile.compiler.plugins` documents passes of other packages.

`tunecompile.ops` has the semantics of all ops, and `tunecompile.errors` has all errors.
"""

from typing import Any

from tunecompile.compiler.pass_manager import Context, Pass, recognize
from tunecompile.estimate.estimate import Estimate, estimate
from tunecompile.integrations.export.gguf import save_gguf
from tunecompile.integrations.export.safetensors import save_merged
from tunecompile.integrations.packed_experts.checkpoint import packed_config
from tunecompile.integrations.packed_experts.load import nf4_config
from tunecompile.integrations.packed_experts.quantize import quantize_experts
from tunecompile.integrations.registered import register
from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.ir.rewrite import rewrite
from tunecompile.planner.liveness import tensor_bytes
from tunecompile.report.explain import explain
from tunecompile.report.memory_timeline import memory_timeline
from tunecompile.trainers.api import free, optimize, report, restore
from tunecompile.trainers.watch import Watcher, watch
from tunecompile.verification.check_pass import Example, Finding, check, compiled
from tunecompile.verification.verify import Verification, verify

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Context",
    "Cost",
    "Estimate",
    "Example",
    "Finding",
    "Pass",
    "Verification",
    "Watcher",
    "check",
    "compiled",
    "estimate",
    "explain",
    "free",
    "memory_timeline",
    "nf4_config",
    "op",
    "optimize",
    "packed_config",
    "quantize_experts",
    "recognize",
    "refuse_gpu",
    "register",
    "report",
    "restore",
    "rewrite",
    "save_gguf",
    "save_merged",
    "tensor_bytes",
    "verify",
    "watch",
]


def __getattr__(name: str) -> Any:
    """`Callback` needs transformers, which is an extra."""
    if name == "Callback":
        from tunecompile.trainers.huggingface import Callback

        return Callback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
