"""Code for a GPU of a family's layers, in batches of changing shapes, generated on a machine without one.

    python -m tests.support.matrix.gpu_code "Llama 3.2 Vision" nf4    # a line of JSON for each graph

The steps run op by op on the CPU, in the shapes of `compiled.CELLS`; each final graph is lowered as for an H100, and Inductor
generates its code. That shows where Inductor fails, which the op-by-op tests cannot see. What the code computes, a GPU shows.
"""

import json
import sys
import time
import warnings
from contextlib import nullcontext
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch._inductor import compile_fx, config

import tunecompile
from tests.support import zoo
from tests.support.matrix.compiled import FAMILIES, in_half, prepared
from tests.support.stand_in_gpu import code_of
from tunecompile._torch.fake_tensors import copied
from tunecompile.ir.pretend_gpu import as_on_gpu


def generated(gm, backward):
    """A row: how many nodes were lowered, how long it took, and the error, if there was one."""
    begun, work = time.perf_counter(), copied(gm)
    with as_on_gpu("h100"):
        config.post_grad_custom_pre_pass(work.graph)
    work.recompile()
    row = {"backward": backward, "nodes": len(work.graph.nodes), "error": ""}
    try:
        code_of(work, backward, around=nullcontext)  # it is around the compilation already
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:500]
    return row | {"seconds": round(time.perf_counter() - begun, 1)}


def rows_of(name, mode):
    """The row of each graph, as it comes."""
    plain, rows = compile_fx.compile_fx_inner, []

    def inner(gm, inputs, **told):
        with mock.patch.object(compile_fx, "compile_fx_inner", plain):
            rows.append(generated(gm, bool(told.get("is_backward"))))
        return make_boxed_func(gm.forward)

    model = prepared(name, mode, "cpu")
    with mock.patch.object(compile_fx, "compile_fx_inner", inner):
        tunecompile.optimize(model)
        for batch in FAMILIES[name].batches():
            zoo.step(model, in_half(batch))
            yield from rows
            rows.clear()


def main(name, mode):
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    for row in rows_of(name, mode):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
