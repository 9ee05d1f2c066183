"""The systems of a comparison by name, and `Job`, the whole task of one system as plain data."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tunecompile.errors import BadShape, UnknownSystem

REFERENCE = "reference"  # the high-precision run by which the others are judged; users cannot choose it
Engine = Literal["ddp", "fsdp2", "zero3", "device_map", "alone"]  # for several GPUs; alone: separate trainings
PARALLEL = get_args(Engine)
# packages of engines that need no extra one; the others are code of transformers
DISTRIBUTIONS = {"compile": "torch", "compile-layers": "torch", "tunecompile": "tunecompile"}


@dataclass(frozen=True)
class System:
    """One way to run the same training code."""

    name: str
    engine: str  # hf, compile, compile-layers, liger, unsloth, tunecompile or reference
    checkpointing: bool | None = None  # None: by the user's option
    package: str | None = None  # the package that it needs
    precision: str | None = None  # of tunecompile, besides the model's own
    padding_free: bool = False  # gets batches as one row without padding
    memory: str | None = None  # the memory budget of tunecompile

    @property
    def installed(self) -> bool:
        """Whether its package can be imported."""
        return self.package is None or importlib.util.find_spec(self.package) is not None

    @property
    def unbudgeted(self) -> str:
        """The name without a budget."""
        return self.name.partition("@")[0]

    @property
    def distribution(self) -> str:
        """The distribution of the package whose version is that of the system."""
        return (self.package or DISTRIBUTIONS.get(self.engine, "transformers")).replace("_", "-")


SYSTEMS = {
    system.name: system
    for system in (
        System("hf", "hf"),
        System("hf-checkpoint", "hf", checkpointing=True),
        System("compile", "compile"),
        System("compile-layers", "compile-layers"),
        System("liger", "liger", package="liger_kernel"),
        System("liger-checkpoint", "liger", checkpointing=True, package="liger_kernel"),
        System("unsloth", "unsloth", checkpointing=True, package="unsloth"),
        System("unsloth-no-checkpoint", "unsloth", checkpointing=False, package="unsloth"),
        System("unsloth-padding-free", "unsloth", checkpointing=False, package="unsloth", padding_free=True),
        System("tunecompile", "tunecompile"),
        System("tunecompile-fp8", "tunecompile", precision="fp8"),
        System("tunecompile-int8", "tunecompile", precision="int8"),
        System(REFERENCE, REFERENCE),
    )
}
REDUCED = ("tunecompile-fp8", "tunecompile-int8")  #: they round on purpose
ALIASES = {"eager": "hf"}


def system(name: str) -> System:
    """The system of a name. `tunecompile@20GiB` is tunecompile with that budget.

    Raises:
        KeyError: there is no system of that name.
    """
    base, _, budget = name.partition("@")
    if not budget:
        return SYSTEMS[name]
    if SYSTEMS[base].engine != "tunecompile":
        raise KeyError(name)
    return dataclasses.replace(SYSTEMS[base], name=name, memory=budget)


def resolve_systems(names: str, checkpointing: bool) -> list[System]:
    """The systems of a list such as "eager,tunecompile", by the names in results. Raises `UnknownSystem`."""
    chosen = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        name = ALIASES.get(name, name)
        if checkpointing and f"{name}-checkpoint" in SYSTEMS:
            name += "-checkpoint"
        try:
            found = system(name)
        except KeyError:
            found = None
        if found is None or name == REFERENCE:
            raise UnknownSystem(
                name=name,
                known=", ".join(["eager", *(n for n in SYSTEMS if n != REFERENCE), "tunecompile@20GiB (any budget)"]),
            )
        if found not in chosen:
            chosen.append(found)
    if not chosen:
        raise UnknownSystem(name=names, known=", ".join(SYSTEMS))
    return chosen


@dataclass(frozen=True)
class Shape:
    """A batch of random tokens: rows and length; if padded, rows have real lengths up to `length`."""

    rows: int
    length: int
    padded: bool = False

    def __str__(self) -> str:
        return f"{'padded-' * self.padded}{self.rows}x{self.length}"

    def within(self, length: int) -> Shape:
        """The shape with its length limited."""
        return dataclasses.replace(self, length=min(length, self.length))


def parse_shape(text: str) -> Shape:
    """The shape of a text such as `4x2048` or `padded-8x512`. Raises `BadShape`."""
    found = re.fullmatch(r"(padded-)?([1-9]\d*)x([1-9]\d*)", text.strip())
    if not found:
        raise BadShape(text=text)
    return Shape(int(found[2]), int(found[3]), bool(found[1]))


@dataclass(frozen=True)
class Job:
    """The task of one system. All jobs of a comparison differ only in `system` and the output paths."""

    system: str
    model: str  # a folder, a hub id or a shape name
    mode: str = "qlora"  # qlora, lora or full
    trainer: str = "sft"  # sft (TRL's trainer) or loop
    loss: str = "sft"  # sft or dpo: preference pairs; the reference is the model without its adapter
    data: str | None = None
    shapes: tuple[str, ...] = ()  # random tokens of these shapes, without data
    steps: int = 20
    batch: int = 4
    seq_len: int = 512
    pad_to: int = 64  # lengths are padded to a multiple of this, for few different shapes
    batching: str = "padded"  # padded or packed: the same rows as one row without padding, each with its own positions
    too_long: str = "error"  # error or drop
    lr: float = 2e-4
    seed: int = 0
    #: number of the repetition, with new adapters, order of rows, random tokens and dropout; weights and held-out rows
    #: are those of `seed`
    repeat: int = 0
    dtype: str = "float32"  # of computation: float32 or bfloat16
    device: str = "cpu"
    checkpointing: bool = False
    gpus: int = 1
    parallel: str = "ddp"  # one of PARALLEL
    layers: int | None = None  # number of layers of a shape model; None: all
    experts: bool = True  # put adapters on stacks of experts' weights, too
    rank: int = 16
    alpha: int = 16
    held_out: int = 0  # number of rows for the held-out loss, which are not trained on
    questions: int = 0  # number of held-out questions that are answered before and after
    adapter: str | None = None  # where to save the adapter
    gradients: str | None = None  # where to save the gradients of the check step
    saved_bytes: bool = True
    launches: bool = True
    trust_cache: bool = False  # use the compilers' usual caches, for a warm first step

    def __post_init__(self):
        object.__setattr__(self, "shapes", tuple(self.shapes))

    @property
    def engine(self) -> str:
        """The engine of the system."""
        return system(self.system).engine

    @property
    def precision(self) -> str | None:
        """The precision of the system, besides the model's own."""
        return system(self.system).precision

    @property
    def memory(self) -> str | None:
        """The memory budget of the system."""
        return system(self.system).memory

    @property
    def checkpoints(self) -> bool:
        """Whether the system checkpoints: by its name, or else by the user's option."""
        fixed = system(self.system).checkpointing
        return self.checkpointing if fixed is None else fixed

    @property
    def placed(self) -> bool:
        """Whether one process has layers on several GPUs."""
        return self.gpus > 1 and self.parallel == "device_map"

    @property
    def processes(self) -> int:
        """Number of processes: one for each GPU, or one for all."""
        return 1 if self.placed else self.gpus

    @property
    def draw(self) -> int:
        """The seed of what differs between repetitions."""
        return self.seed + self.repeat

    @property
    def shape(self) -> str:
        """ROWSxLENGTH of a batch."""
        return f"{self.batch}x{self.seq_len}"

    def replace(self, **changes: Any) -> Job:
        """A copy with changes."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict:
        """The fields as JSON has them."""
        return dataclasses.asdict(self) | {"shapes": list(self.shapes)}
