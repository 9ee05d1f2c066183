"""What is compared: the systems by name, and a `Job`, which is one system's whole task as plain data."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from dataclasses import dataclass

from tunecompile.cli.compare.errors import BadShape, UnknownSystem

REFERENCE = "reference"  # the high-precision run that the others are judged against; not a system a user picks
PARALLEL = (
    "ddp",
    "fsdp2",
    "zero3",
    "device_map",
    "alone",
)  # what joins several GPUs; alone: nothing does, and each trains a model of its own


DISTRIBUTIONS = {
    "compile": "torch",
    "compile-layers": "torch",
    "tunecompile": "tunecompile",
}  # of engines that need no package of their own; others are transformers' code


@dataclass(frozen=True)
class System:
    """One way to run the same training code."""

    name: str
    engine: str  # hf, compile, compile-layers, liger, unsloth, tunecompile or reference
    checkpointing: bool | None = None  # None: as the user asks
    package: str | None = None  # what has to be importable
    precision: str | None = None  # of tunecompile: beside the model's own
    padding_free: bool = False  # gets padded batches as one row without padding
    memory: str | None = None  # of tunecompile: the budget of its step

    @property
    def installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None

    @property
    def unbudgeted(self) -> str:
        """The same system's name without a budget."""
        return self.name.partition("@")[0]

    @property
    def distribution(self) -> str:
        """What pip calls the package whose version this system has."""
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
        System(REFERENCE, REFERENCE),
    )
}
ALIASES = {"eager": "hf"}


def system(name: str) -> System:
    """By name. `tunecompile@20GiB` is tunecompile within that budget.

    Raises:
        KeyError: there is none of that name.
    """
    base, _, budget = name.partition("@")
    if not budget:
        return SYSTEMS[name]
    if SYSTEMS[base].engine != "tunecompile":
        raise KeyError(name)
    return dataclasses.replace(SYSTEMS[base], name=name, memory=budget)


def resolve_systems(names: str, checkpointing: bool) -> list[System]:
    """`eager,tunecompile` -> systems, under the names that the results use."""
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
    """Rows and length of a batch of random tokens. Padded: rows of real lengths, none longer than `length`."""

    rows: int
    length: int
    padded: bool = False

    def __str__(self) -> str:
        return f"{'padded-' * self.padded}{self.rows}x{self.length}"

    def within(self, length: int) -> Shape:
        return dataclasses.replace(self, length=min(length, self.length))


def parse_shape(text: str) -> Shape:
    """`4x2048` or `padded-8x512`."""
    found = re.fullmatch(r"(padded-)?([1-9]\d*)x([1-9]\d*)", text.strip())
    if not found:
        raise BadShape(text=text)
    return Shape(int(found[2]), int(found[3]), bool(found[1]))


@dataclass(frozen=True)
class Job:
    """One system's task. Everything but `system` and the output paths is the same for all systems of a comparison."""

    system: str
    model: str  # a folder, a hub id or a shape name
    mode: str = "qlora"  # qlora, lora or full
    trainer: str = "sft"  # sft (TRL's trainer for the loss) or loop
    loss: str = "sft"  # or dpo: preference pairs, with the model without its adapter as the reference
    data: str | None = None
    shapes: tuple[str, ...] = ()  # random tokens of these shapes, instead of data
    steps: int = 20
    batch: int = 4
    seq_len: int = 512
    pad_to: int = 64  # lengths are padded to a multiple of this, so that few shapes occur
    batching: str = "padded"  # or packed: the same rows as one without padding, whose positions begin anew with each
    too_long: str = "error"  # error or drop
    lr: float = 2e-4
    seed: int = 0
    repeat: int = 0  # which of several seeds: adapters, order of rows, random tokens and dropout are drawn anew; weights and held-out rows stay
    dtype: str = "float32"  # what is computed in: float32 or bfloat16
    device: str = "cpu"
    checkpointing: bool = False
    gpus: int = 1
    parallel: str = "ddp"  # what joins them: one of PARALLEL
    layers: int | None = None  # shape models only: that many layers instead of all
    rank: int = 16
    alpha: int = 16
    held_out: int = 0  # rows kept from training, for the held-out loss
    questions: int = 0  # held-out questions answered before and after
    adapter: str | None = None  # where to save the adapter
    gradients: str | None = None  # where to save the gradients of the check step
    saved_bytes: bool = True
    launches: bool = True
    trust_cache: bool = False  # keep the compiler's own caches, so that the first step is a warm one

    def __post_init__(self):
        object.__setattr__(self, "shapes", tuple(self.shapes))

    @property
    def engine(self) -> str:
        return system(self.system).engine

    @property
    def precision(self) -> str | None:
        return system(self.system).precision

    @property
    def memory(self) -> str | None:
        return system(self.system).memory

    @property
    def checkpoints(self) -> bool:
        """Whether this system checkpoints: its name decides, or else the user's flag."""
        fixed = system(self.system).checkpointing
        return self.checkpointing if fixed is None else fixed

    @property
    def placed(self) -> bool:
        """Whether one process has layers on several GPUs."""
        return self.gpus > 1 and self.parallel == "device_map"

    @property
    def processes(self) -> int:
        """One a GPU, or one for all."""
        return 1 if self.placed else self.gpus

    @property
    def draw(self) -> int:
        """The seed of what is drawn anew in each repetition."""
        return self.seed + self.repeat

    @property
    def shape(self) -> str:
        return f"{self.batch}x{self.seq_len}"

    def replace(self, **changes) -> Job:
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict:
        return dataclasses.asdict(self) | {"shapes": list(self.shapes)}  # as JSON gives it back
