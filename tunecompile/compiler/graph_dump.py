"""Dumps of the compiler's graphs: each graph before the first pass, and after every pass that changed it.

    TUNECOMPILE_DUMP=folder python train.py    # readable Python, numbered in the order in which it was made
    TORCH_TRACE=folder python train.py         # the same among the artifacts of torch's structured trace, which tlparse
    shows

A name has number, region, stage and pass: `0003.model_layers_LlamaDecoderLayer.recognize.rms_norm.py`, and under
`lower` also whether it is the forward or the backward graph. Processes may share a folder: no file is ever overwritten,
and names have the rank.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import Graph

from tunecompile._torch.inductor import is_tracing, trace_artifact

__all__ = ["VARIABLE"]

log = logging.getLogger("tunecompile")
VARIABLE = "TUNECOMPILE_DUMP"  #: environment variable that names the folder; it is made where it is missing


@dataclass
class GraphDump:
    """Writes the graphs of one compilation of one region to a folder, to torch's trace, or to both."""

    region: str
    folder: Path | None
    traces: bool
    last: str = ""  #: the text written last: a pass that changes nothing leaves no file

    @staticmethod
    def begin(region: str) -> GraphDump | None:
        """A dump as the environment requests it; None where it requests none."""
        folder, traces = os.environ.get(VARIABLE), is_tracing()
        return GraphDump(region, Path(folder) if folder else None, traces) if folder or traces else None

    def show(self, stage: str, which: str, name: str | None, graph: Graph, difference: Mapping[str, int]) -> None:
        """Write a graph. Whatever fails here, training goes on.

        Args:
            stage: of the compiler.
            which: dynamo, joint, forward or backward.
            name: the pass that left the graph so; None: before the first pass.
            graph: not changed.
            difference: how many more or fewer there are of each operation.
        """
        try:
            text = _readable(graph)
            if text == self.last:
                return
            self.last = text
            what = f"after pass {name}: {describe_change(difference)}" if name else "before the first pass"
            head = f"# region {self.region}, stage {stage}, {which} graph, process {os.getpid()}\n# {what}\n\n"
            title = ".".join(
                (_plain(self.region), stage, *([which] if stage == "lower" else []), _plain(name or "before"))
            )
            if self.traces:
                trace_artifact(f"tunecompile.{title}", head + text)
            if self.folder is not None:
                _write(self.folder, _rank() + title, head + text)
        except Exception as error:
            log.debug("no graph of %s was written", self.region, exc_info=True)
            _warn(self.folder, type(error).__name__)


def describe_change(difference: Mapping[str, int]) -> str:
    """The operations that are new, then those that are gone: `+1 tunecompile.rms_norm  -2 mul`."""
    ordered = sorted(difference.items(), key=lambda item: (item[1] < 0, item[0]))
    return "  ".join(f"{count:+d} {name}" for name, count in ordered) or "the same operations"


def _readable(graph: Graph) -> str:
    """A graph as Python with shapes, the user's source lines and the plan's tags."""
    module = graph.owning_module
    if module is None:
        return graph.python_code("self", verbose=True, include_stride=True, include_device=True, expanded_def=True).src
    return module.print_readable(print_output=False, include_stride=True, include_device=True, expanded_def=True)


def _write(folder: Path, title: str, text: str) -> None:
    """Write under the first free number. Where another process takes the same name first, try the next one."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(digits) for file in folder.iterdir() if (digits := file.name.partition(".")[0]).isdecimal()]
    number = max(numbers, default=-1) + 1
    while True:
        try:
            with open(folder / f"{number:04d}.{title}.py", "x", encoding="utf-8") as file:
                file.write(text)
            return
        except FileExistsError:
            number += 1


def _rank() -> str:
    """The rank as the beginning of a file's name; empty without process groups."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return f"rank{torch.distributed.get_rank()}." if distributed else ""


def _plain(name: str) -> str:
    """A name as part of a file's name."""
    return re.sub(r"\W", "_", name)[:100]


@functools.cache
def _warn(folder: Path | None, error: str) -> None:
    """Warn once, though every pass of every region fails alike."""
    log.warning("tunecompile: graphs cannot be written to %s: %s", folder or "the trace", error)
