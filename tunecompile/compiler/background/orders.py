"""What the training tells the process that generates code for it: one file for each order, and one for its answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.fx import Graph

from tunecompile._torch.inductor import CustomGraphPass, CustomPartitionerFn
from tunecompile.compiler.background.providers import foreign_modules, providers_now
from tunecompile.compiler.partitioner import Lowering, Partitioner
from tunecompile.compiler.pass_manager import Context, Pass, live, run_stage

__all__ = ["Answer", "KnownLowering", "KnownPartitioner", "answer_of", "order_of", "others_of", "write"]


def others_of(lower: Lowering, partition: Partitioner, graphs: Sequence[Graph]) -> tuple[tuple[str, ...], tuple]:
    """Modules of the graphs' ops, and what code depends on beside its graphs and torch's settings: the passes that run
    on final graphs, and the providers of ops.

    Raises:
        ValueError: one of these passes is another package's, which may be switched off in one process alone.
    """
    context = lower.context
    passes = tuple(each for each in live(lower.passes) if each.stage == "lower")
    if (guest := next((each for each in passes if each.package is not None), None)) is not None:
        raise ValueError(f"the pass {guest.name} of {guest.package} runs on its final graphs")
    about = context.region, context.plan, context.precision, context.attention
    return foreign_modules(graphs), (passes, lower.uuid(), partition.uuid(), about, providers_now())


class Named:
    """What stands in the place of something of another process, under the name that it has there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def uuid(self) -> str:
        """Torch's caches know it by this."""
        return self.name

    def __reduce__(self) -> tuple:
        return str, (self.name,)


class KnownLowering(Named, CustomGraphPass):
    """The passes of another process on a final graph."""

    def __init__(self, passes: Sequence[Pass], uuid: str, context: Context) -> None:
        super().__init__(uuid)
        self.passes, self.context = passes, context

    def __call__(self, graph: Graph) -> None:
        run_stage(self.passes, "lower", graph, self.context)


class KnownPartitioner(Named, CustomPartitionerFn):
    """In the place of the one that has cut the graphs in another process."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("these graphs are cut already")


@dataclass(frozen=True)
class Answer:
    """What came of one order."""

    seconds: float  #: that code generation took
    error: str = ""  #: why it failed


def order_of(folder: Path, number: int) -> Path:
    """The file of an order."""
    return folder / f"{number}.order"


def answer_of(folder: Path, number: int) -> Path:
    """The file of its answer."""
    return folder / f"{number}.answer"


def write(file: Path, content: bytes) -> None:
    """Write a file that nobody sees before it is whole."""
    part = file.with_suffix(f"{file.suffix}.part")
    part.write_bytes(content)
    part.replace(file)


def to_json(answer: Answer) -> bytes:
    """An answer as its file has it."""
    return json.dumps({"seconds": answer.seconds, "error": answer.error}).encode()


def from_json(content: bytes) -> Answer:
    """The answer of a file."""
    return Answer(**json.loads(content))
