"""The schema of saved results, `report.json` of a comparison and the files in `benchmarks/results/`.

Results are validated when they are read. A new field keeps the version; a renamed field, or one with another meaning,
raises it. `Result.model_json_schema()` is the JSON Schema.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from tunecompile.cli.compare.machine import SCHEMA
from tunecompile.errors import NotAResult, UnknownSchema


class Part(BaseModel):
    """A part of a result. Additional fields are kept."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Machine(Part):
    """The machine of the measurement."""

    gpu: str | None
    gpu_count: int
    cpu: str
    memory_gib: float | None


class StepMs(Part):
    """Milliseconds of the timed steps."""

    median: float
    min: float
    max: float


class Run(Part):
    """One system on one shape with one seed."""

    system: str
    model: str
    mode: Literal["qlora", "lora", "full"]
    shape: str  # ROWSxLENGTH
    status: str  # ok, oom, not installed, error: ..., or left out: no time was left
    order: int
    seed: int | None = None  # for adapters, the order of the rows and dropout
    version: str | None = None  # of the system's package: transformers for hf, torch for compile
    install: str | None = None  # the command that installs it, if it is not installed
    tokens_per_s: float | None = None  # without padding
    step_ms: StepMs | None = None
    all_step_ms: list[float] | None = None  # the last `repeats` are the timed ones
    repeats: int | None = None
    peak_gib: float | None = None
    peak_reserved_gib: float | None = None
    saved_bytes: int | None = None
    first_step_s: float | None = None
    losses: list[float] | None = None  # one a step
    trainable: int | None = None  # number of trained values
    predicted: dict[str, Any] | None = None  # peak_gib and step_ms of tunecompile's estimate
    held_out_before: float | None = None  # nats a trained token
    held_out_after: float | None = None

    @model_validator(mode="after")
    def has_figures(self) -> Run:
        """Check that a finished run has its figures."""
        missing = [
            name
            for name in ("tokens_per_s", "step_ms", "peak_gib", "first_step_s", "losses")
            if getattr(self, name) is None
        ]
        if self.status == "ok" and missing:
            raise ValueError(f"a run that is ok needs {', '.join(missing)}")
        return self


class GradientError(Part):
    """Relative distances to the reference's gradient; the yardstick is eager's, but at least the rounding error."""

    parameter: str
    error: float
    eager_error: float
    norm_ratio: float
    yardstick: float


class Verdict(Part):
    """A check and its outcome."""

    name: str
    passed: bool
    detail: str


class Result(Part):
    """A saved result."""

    schema_: Literal[SCHEMA]  # pyright: ignore[reportInvalidTypeForm]
    date: str
    commit: str | None
    command: str
    machine: Machine
    versions: dict[str, str]
    runs: list[Run]
    gradients: list[GradientError]
    reduced_gradients: list[GradientError] = []
    verdicts: list[Verdict]
    settings: dict[str, bool | int | float | str | list[str] | None]
    incomplete: list[str] | None = None  # what a run that was cut off still had to do
    spent_s: dict[str, dict[str, float]] | None = None  # seconds of each part of a system's process

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"), extra="allow")

    @model_validator(mode="after")
    def has_runs(self) -> Result:
        """Check that there is a run."""
        if not self.runs:
            raise ValueError("there are no runs")
        return self


def load_result(path: str | Path) -> dict:
    """The saved result at a path, validated.

    Raises:
        NotAResult: there is no such file, or it is no result; the message names the first wrong field.
        UnknownSchema: another version of tunecompile wrote it with another schema.
    """
    try:
        held = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotAResult(path=path, reason=f"{type(error).__name__}: {error}") from None
    if not isinstance(held, dict) or "schema" not in held:
        raise NotAResult(path=path, reason="it has no 'schema'")
    if held["schema"] != SCHEMA:
        raise UnknownSchema(
            path=path, found=held["schema"], known=SCHEMA, command=held.get("command", "tunecompile compare")
        )
    try:
        Result.model_validate(held)
    except ValidationError as error:
        first = error.errors()[0]
        raise NotAResult(path=path, reason=f"{'.'.join(map(str, first['loc'])) or 'runs'}: {first['msg']}") from None
    return held
