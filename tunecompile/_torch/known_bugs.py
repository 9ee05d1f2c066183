"""Faults of other packages that give wrong numbers, crash, hang or cost seconds: versions, and what is done instead.

The code that does so asks `fault.present`, so that it stops by itself where a version is known that has the fault no
more. `tests/_torch/test_known_bugs.py` shows every fault on the versions installed: where one is gone, its test fails
and says to narrow the entry.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from dataclasses import dataclass
from typing import Any

from torch.torch_version import TorchVersion


@dataclass(frozen=True)
class Fault:
    """A bug of a package in versions [since, fixed).

    Every version counts that is not excluded: a development version of `fixed`, too.
    """

    package: str  #: as PyPI calls it
    what: str  #: what goes wrong, and where
    instead: str  #: what is done about it
    since: tuple[int, ...] = (0,)
    fixed: tuple[int, ...] | None = None  #: None: not yet
    issue: str = ""  #: "owner#number" of its report; empty where none is known

    @property
    def present(self) -> bool:
        """Whether the installed version has it."""
        version: Any = installed(self.package)  # `TorchVersion` compares with tuples, and is typed as a string
        return version is not None and version >= self.since and (self.fixed is None or version < self.fixed)

    def __str__(self) -> str:
        return (
            f"{self.package} {installed(self.package)}: {self.what}{self.issue and f' ({self.issue})'}. {self.instead}"
        )


@functools.cache
def installed(package: str) -> TorchVersion | None:
    """Comparable with tuples of numbers; None where the package is not there."""
    try:
        loaded = getattr(
            sys.modules.get(package), "__version__", None
        )  # a torch that was built by hand may have no metadata
        return TorchVersion(loaded or importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None


MIX_ORDER_REDUCTION = Fault(
    "torch",
    "Inductor's mix-order reduction leaves gradients unwritten that are slices of one tensor",
    "It is switched off for the compiled layers",
    since=(2, 10),
    fixed=(2, 15),
    issue="pytorch#193061",
)

PADDING_GUARDS_SIZES = Fault(
    "torch",
    "Inductor guards how many rows there are when it considers to pad a product whose other sizes are not aligned, and "
    "so compiles graphs for changing sizes again and again",
    "In such graphs it pads none",
    fixed=(2, 13),
)

GUARD_TAGS = Fault(
    "torch",
    "Dynamo skips guards by the tags of a model's dictionaries, and keeps their addresses when the model is gone: a "
    "later model, or Python's collector, crashes the process",
    "Guards of the compiled layers have no tags",
    since=(2, 9),
    fixed=(2, 12),
    issue="pytorch#180741",
)

CUDNN_GRADIENT_LAYOUT = Fault(
    "torch",
    "cuDNN's attention reads the gradient of its output as it lay in the first call of the same sizes, query, key and "
    "value: where layers differ in it (Flux), gradients are wrong or memory is read that is not there",
    "In compiled layers it is copied into the output's layout",
    issue="pytorch#191576",
)

REMAINDERS_OF_SYMBOLS = Fault(
    "torch",
    "a remainder of an integer that is a symbol cannot become a float (TensorReferenceAnalysis has no python_mod)",
    "In compiled layers it is a constant",
)

ROW_SCALES_ON_ADA = Fault(
    "torch",
    "FP8 products scaled by row run outside the current stream on Ada",
    "There frozen products stay as they are",
    fixed=(2, 12),
    issue="pytorch#177651",
)

GROUPED_MM_IN_FP32 = Fault(
    "torch",
    "grouped_mm is refused in fp32 while a graph is traced, and computed outside",
    "Experts that call it run eagerly",
    since=(2, 10),
    fixed=(2, 15),
)

TRITON_ANALYSIS_REPEATED = Fault(
    "torch",
    "a Triton kernel's IR is generated anew, in 20 to 50 ms, each of the three times or more that a launch is analysed",
    "Results are cached while a region is compiled",
    issue="pytorch#193227",
)

DELTA_RULE_ON_SM_100 = Fault(
    "triton",
    "the compiler fails at the gradients of delta rules for GPUs of compute capability 10 (the pass "
    "OptimizeTMemLayouts: parent layout must have at least rank >= 2)",
    "There torch computes delta rules",
    fixed=(3, 8),
)

FLA_ON_HOPPER = Fault(
    "triton",
    "gradients of fla's gated delta rules are wrong on GPUs of compute capability 9, and fla refuses them there",
    "There our template computes them",
    since=(3, 4),
    fixed=(3, 7, 1),
    issue="flash-linear-attention#640",
)

BLOCKS_ACROSS_ROWS = Fault(
    "bitsandbytes",
    "on CPUs with AVX512 a block of 4-bit codes that goes on in the next row gets that row's scale",
    "Rows that no block divides are dequantised by the op's own reference, and for references and exports as rows of a "
    "block each",
)

DEQUANTIZED_IN_FP64 = Fault(
    "bitsandbytes",
    "4-bit codes dequantised to fp64 on a CPU are left out: the result is memory as it was",
    "References in fp64 request fp32, and convert",
)

PACKED_FOR_EVALUATION = Fault(
    "bitsandbytes",
    "on CPUs with AVX512-BF16 an evaluation packs 4-bit weights for good, rounds their scales, and gradients stop at "
    "them in later steps",
    "Linears of an optimized model do not pack",
)

ADAPTED_4_BIT_STACKS = Fault(
    "peft",
    "of adapters over two 4-bit stacks of one module the inner is left out, and both stay on them behind the call, so "
    "that the next one fails",
    "Layers of an optimized model have them computed in another way",
    since=(0, 21),
)

FAULTS = {name: value for name, value in globals().items() if isinstance(value, Fault)}
