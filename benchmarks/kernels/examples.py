"""Every op that says `example=`, with its template and by its reference under Inductor: bytes are those of arguments and results.

    python benchmarks/kernels/examples.py --only gated_activation

No other project's kernels, and one layout: the files beside this one have those. A new op needs no line here.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

import tunecompile.ops  # noqa: F401
from benchmarks._harness import INDUCTOR, TEMPLATE, compiled, main, relative_error
from benchmarks._jobs import DEVICE
from tunecompile.ir.eager_call import outputs, run_provider
from tunecompile.ir.example import Draw, arguments_of
from tunecompile.ir.op import OPS
from tunecompile.passes.plan.probe import BY_TEMPLATE


def moved(values):
    return sum(each.nbytes for each in tree_leaves(values) if isinstance(each, torch.Tensor))


def error(value, reference):
    """The largest among the results."""
    pairs = zip(outputs(value), outputs(reference))
    return max(relative_error(got, wanted) for got, wanted in pairs if got is not None and wanted.numel())


def run(bench):
    for op in OPS.values():
        templates = [each for each in op.providers if each.name in BY_TEMPLATE]
        draw = Draw(torch.device(DEVICE), torch.bfloat16, bench.size(8192), bench.size(4096))
        given = arguments_of(op, draw) if templates and bench.only in f"{bench.family} {op.name}" else None
        if given is None:
            continue
        made = outputs(op.reference(*given))
        systems = {
            TEMPLATE if len(templates) == 1 else each.name: partial(call, each.run, len(made)) for each in templates
        }
        bench(
            op.name,
            {INDUCTOR: compiled(op.reference), **systems},
            lambda seed, given=given: given,
            bytes=moved(given) + moved(made),
            check=error,
        )


def call(provider, count, *given):
    return run_provider(provider, given, (True,) * count)


if __name__ == "__main__":
    main({"examples": run})
