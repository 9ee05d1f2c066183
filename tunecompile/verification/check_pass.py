"""Is a pass right? Five nets for its author: graphs, other spellings, near misses, ops alone, and a training step.

EXAMPLES = [Example(lambda x: torch.relu(x).square(), lambda dtype: [torch.randn(3, 8, dtype=dtype,
requires_grad=True)])] for finding in check([PASS], EXAMPLES): print(finding)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from tunecompile import passes as own_passes
from tunecompile._torch.dynamo import reset
from tunecompile.compiler.backend import Backend, Executor
from tunecompile.compiler.pass_manager import Pass
from tunecompile.errors import summary
from tunecompile.verification.nets import near_misses, ops_alone, pass_on_graphs, spellings, training_step
from tunecompile.verification.pass_examples import CLOSE, FACTOR, Answer, Example, Finding

__all__ = ["CLOSE", "FACTOR", "Example", "Finding", "check", "compiled"]

#: the nets, by the name that findings have
NETS: tuple[tuple[str, Callable[[Sequence[Pass], Example], Iterator[Answer]]], ...] = (
    ("pass", pass_on_graphs),
    ("spelling", spellings),
    ("near miss", near_misses),
    ("op", ops_alone),
    ("model", training_step),
)


def check(passes: Sequence[Pass], examples: Sequence[Example], seed: int = 0) -> Iterator[Finding]:
    """Put each example through five nets. No GPU is needed.

    - pass: it is found in every dtype, as right as the plain function, and left alone the second time.
    - spelling: other spellings of its graph are found, and right.
    - near miss: graphs with one change each stay right, whether they match or not.
    - op: schema and shape rule hold, gradients are those of its values (`torch.autograd.gradcheck`, fp64), and
      providers that run here are as exact as the reference.
    - model: a training step of a small model is verified.

    A result is right if it is at most `FACTOR` times as far from fp64's as the plain function's, or nearer to it than
    `CLOSE` times the dtype's resolution.

    Args:
        passes: under test, in order. Those of tunecompile take part in the model's step alone.
        examples: that the passes have to find.
        seed: of the random numbers.

    Returns:
        Findings, as they are made. A net that raises has failed.
    """
    for example in examples:
        for net, run in NETS:
            torch.manual_seed(seed)
            reset()
            try:
                for asked, passed, detail in run(passes, example):
                    yield Finding(net, str(example), asked, passed, detail)
            except Exception as error:
                yield Finding(net, str(example), "runs", False, summary(error))


def compiled(function: Callable, passes: Sequence[Pass], executor: Executor = "inductor") -> Callable:
    """Compile a function as `optimize` compiles a model: by these passes and those of tunecompile. For benchmarks.

    Args:
        function: of tensors. Dynamo must trace it as one graph.
        passes: in order, before tunecompile's own.
        executor: as for `optimize`.

    Returns:
        A function of the same arguments.
    """
    reset()
    backend = Backend("example", [*passes, *own_passes.PIPELINE], executor)
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
