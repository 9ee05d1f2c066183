"""Every template against its reference under Inductor, the kernels of Liger, Unsloth and bitsandbytes for the same work, and the memory's limit.

    python benchmarks/kernels --out benchmarks/results/kernels.json     # the README's cases, a few minutes
    python benchmarks/kernels --no-shown                                # all cases
    TRITON_INTERPRET=1 python benchmarks/kernels --dry                  # without a GPU: does everything run?

`benchmarks/report.py --write` makes the README's table of the JSON. A template that loses to what Inductor makes of its reference has no
place in the tree.
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._harness import main

FAMILIES = ("rms_norm", "swiglu", "cross_entropy", "nf4", "lora", "lora_mlp", "eight_bits")

if __name__ == "__main__":
    families = {name: importlib.import_module(f"benchmarks.kernels.{name}").run for name in FAMILIES}
    main(families, shown=True)
