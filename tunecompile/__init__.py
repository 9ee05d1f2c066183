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

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; `HOMES` says the same when the code runs
    from tunecompile.api import free, optimize, report, restore
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
    from tunecompile.trainers.huggingface import Callback
    from tunecompile.trainers.watch import Watcher, watch
    from tunecompile.verification.check_pass import Example, Finding, check, compiled
    from tunecompile.verification.verify import Verification, verify

__version__ = "0.1.0"
#: the module of each public name: it is imported when the name is first read, and Dynamo, sympy and Triton with it
HOMES = {
    name: module
    for module, names in (
        ("compiler.pass_manager", "Context Pass recognize"),
        ("estimate.estimate", "Estimate estimate"),
        ("integrations.export.gguf", "save_gguf"),
        ("integrations.export.safetensors", "save_merged"),
        ("integrations.packed_experts.checkpoint", "packed_config"),
        ("integrations.packed_experts.load", "nf4_config"),
        ("integrations.packed_experts.quantize", "quantize_experts"),
        ("integrations.registered", "register"),
        ("ir.op", "Cost op refuse_gpu"),
        ("ir.rewrite", "rewrite"),
        ("planner.liveness", "tensor_bytes"),
        ("report.explain", "explain"),
        ("report.memory_timeline", "memory_timeline"),
        ("api", "free optimize report restore"),
        ("trainers.huggingface", "Callback"),
        ("trainers.watch", "Watcher watch"),
        ("verification.check_pass", "Example Finding check compiled"),
        ("verification.verify", "Verification verify"),
    )
    for name in names.split()
}
__all__ = [*HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


class Face(ModuleType):
    """This module: it imports what is read of it.

    `estimate` and `report` are functions, and packages have the same names: an import of one of those would hide the
    function. Nothing is kept here but what is assigned, so that a name is always that of its module.
    """

    def __getattr__(self, name: str) -> Any:
        if name in HOMES:
            return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
        if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in HOMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = Face
