"""Torch's analysis of the tensors that a Triton kernel reads and writes, answered from a cache while code is generated.

Torch needs to know for each launch in a graph which tensors it changes, and analyses the kernel three times or more:
when the launch is traced, when it is lowered, and when mutations are followed. Each analysis generates Triton's IR
anew, 20 to 50 ms: 3.7 s of a first step of 20 s (8B QLoRA, H200). The result depends on nothing but the kernel, its
constants and its arguments' types. pytorch#193227 means to keep it in torch; `known_bugs.TRITON_ANALYSIS_REPEATED`
tells which versions do not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tunecompile._torch import known_bugs
from tunecompile._torch.inductor import triton_kernel_wrap

#: (kernel, its arguments by name, its TMA descriptors by argument) -> what it accesses
Analysis = Callable[[Any, Mapping[str, Any], Mapping[str, Any]], Any]
#: (torch's analysis, and its arguments) -> the same result
Answer = Callable[[Analysis, Any, Mapping[str, Any], Mapping[str, Any]], Any]

_ANALYSES = ("identify_accessed_tensors", "identify_mutated_tensors")  #: torch's names of the analysis, newest first


@contextlib.contextmanager
def analyses_answered_by(answer: Answer) -> Iterator[None]:
    """Let `answer` stand between torch and its analysis, where torch repeats it; elsewhere do nothing.

    The functions are replaced in torch's module, so for the whole process: call it inside a compilation, where Dynamo's
    lock keeps all others out. They are put back at the end, whatever happens inside.

    Args:
        answer: is called in place of torch's analysis, with that as its first argument.
    """
    names = _ANALYSES if known_bugs.TRITON_ANALYSIS_REPEATED.present else ()
    replaced = {name: getattr(triton_kernel_wrap, name) for name in names if hasattr(triton_kernel_wrap, name)}
    for name, analyse in replaced.items():
        setattr(triton_kernel_wrap, name, functools.wraps(analyse)(functools.partial(answer, analyse)))
    try:
        yield
    finally:
        for name, analyse in replaced.items():
            setattr(triton_kernel_wrap, name, analyse)
