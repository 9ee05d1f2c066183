"""Private names of torch, taken away one at a time: `import tunecompile` works, steps are right, and the report names the loss."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tunecompile
from tunecompile._torch import known_bugs, lookup
from tunecompile._torch.private_names import COMPILING_OFF, PRIVATE_NAMES, PrivateName
from tunecompile.cli import doctor
from tunecompile.integrations.private_names import PRIVATE_NAMES as FOREIGN
from tunecompile.runtime import attach

ROOT = Path(__file__).parents[2]
USED = {row.name: row for row in PRIVATE_NAMES if row.used}
#: one without which nothing compiles, and one whose feature alone is switched off
IMPORTANT = ("torch.nn.Module._compiled_call_impl", "torch._guards.TracingContext.try_get")


def without(*cases: str, executor: str = "eager", load: tuple[str, ...] = tuple(USED)) -> dict[str, dict]:
    """What came of a training in processes that lack one of these names each."""
    request = {"executor": executor, "load": load, "lost": [[name] for name in cases]}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/_torch/without_names.py")],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))},
        check=True,
    )
    found = {told["lost"][0]: told for told in map(json.loads, done.stdout.splitlines())}
    assert list(found) == list(cases), done.stderr[-4000:]
    return found


@functools.cache
def important() -> dict[str, dict]:
    return without(*IMPORTANT)


@functools.cache
def others() -> dict[str, dict]:
    return without(*(name for name in USED if name not in IMPORTANT))


def right(told: dict, row: PrivateName) -> None:
    assert "error" not in told, told["error"]
    assert told["loss"] < 1e-6 and told["gradients"] < 1e-6
    if row.required:
        assert told["compiles"] == 0 and COMPILING_OFF in told["notes"][0] and row.name in told["notes"][0]
    else:
        assert told["compiles"] == 1 and str(row) in told["notes"], told["notes"]


@pytest.mark.parametrize("name", IMPORTANT)
def test_without_a_name(name):
    right(important()[name], USED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in USED if name not in IMPORTANT])
def test_without_another_name(name):
    right(others()[name], USED[name])


@pytest.mark.slow
def test_a_name_that_is_looked_up_when_code_is_generated():
    """Its module is not imported before: the first step finds out, and runs eagerly."""
    name = "torch._inductor.compile_fx.compile_fx"
    told = without(name, executor="inductor", load=())[name]
    assert told["loss"] == told["gradients"] == 0, told
    assert any("runs eagerly" in note and name in note for note in told["notes"]), told["notes"]


def test_compiling_is_off(monkeypatch, caplog):
    """Nothing is attached, whatever is asked for; the log and the report say why."""
    why = f"{COMPILING_OFF}: torch has no torch._name"
    monkeypatch.setattr(attach, "why_off", lambda: why)
    monkeypatch.setattr(lookup, "why_off", lambda: why)
    lookup.warn.cache_clear()
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    before = [dict(vars(module)) for module in model.modules()]
    for options in ({}, {"memory": "1GiB", "host_memory": 0, "host_embedding": True, "verify": True}):
        assert tunecompile.optimize(model, **options) is model
        model(torch.ones(2, 3, dtype=torch.long)).sum().backward()
        report = tunecompile.report(model)
        assert report.notes == [why] and not report.compiles and str(report)
        assert tunecompile.restore(model) is model
    assert [dict(vars(module)) for module in model.modules()] == before
    assert [record.getMessage() for record in caplog.records] == [f"tunecompile: {why}"]


def test_all_names_are_there():
    """Of torch, as far as the versions installed should have them."""
    assert [str(row) for row in lookup.missing(load=True)] == []
    assert lookup.notes() == [] and lookup.why_off() == ""


def test_all_names_of_other_packages_are_there():
    assert [str(row) for row in lookup.lost(FOREIGN, load=True)] == []
    assert {row.package for row in FOREIGN} == {
        "transformers",
        "diffusers",
        "peft",
        "accelerate",
        "bitsandbytes",
        "deepspeed",
        "trl",
        "lightning",
    }


def test_a_name_that_no_version_has():
    rows = [PrivateName(name, "it is left out") for name in ("torch._absent", "torch.nn.Module._absent", "torch._a._b")]
    assert lookup.lost(rows, load=True) == lookup.lost(rows, load=False) == tuple(rows)
    assert str(rows[0]) == f"torch {torch.__version__} has no torch._absent (last checked on 2.15): it is left out"


def test_a_name_of_a_module_that_is_not_imported(monkeypatch):
    row = PrivateName("torch._inductor.compile_fx._absent", "it is left out")
    monkeypatch.delitem(sys.modules, "torch._inductor.compile_fx", raising=False)
    assert lookup.lost([row], load=False) == ()


@pytest.mark.parametrize(
    "since, until, version, used",
    [
        ("2.11", "", "2.11.0", True),
        ("2.13", "", "2.11.0", False),
        ("2.11", "2.15", "2.15.0", False),
        ("2.11", "2.15", "2.13.0+cpu", True),
        ("2.11", "", None, False),
    ],
)
def test_a_name_is_used_where_its_versions_say(since, until, version, used, monkeypatch):
    monkeypatch.setattr(
        "tunecompile._torch.private_names.installed", lambda package: version and known_bugs.TorchVersion(version)
    )
    assert PrivateName("torch._name", "it is left out", since=since, until=until).used == used


@pytest.mark.parametrize("fallback, status", [("it is left out", "warning"), (COMPILING_OFF, "fail")])
def test_the_doctor_lists_lost_names(fallback, status, monkeypatch):
    row = PrivateName("torch._absent", fallback)
    monkeypatch.setattr(lookup, "missing", lambda load: (row,))
    monkeypatch.setattr(lookup, "lost", lambda rows, load: ())
    line = doctor.private_names()
    assert line.status == status and str(row) in line.found and "'torch==2.15.*'" in line.mend


def test_names_below_a_class_or_a_function():
    """Attributes of instances, and names in code."""
    for name in ("torch.nn.Module._forward_hooks", "torch.fx.experimental.sym_node.SymNode._expr"):
        assert lookup.exists(name) and lookup.lookup(name) is None
    with pytest.raises(ImportError, match=r"no torch\.cuda\._sleep .*last checked on 2\.15"):
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(torch.cuda, "_sleep")
            lookup.need("torch.cuda._sleep")
    with pytest.raises(KeyError):
        lookup.lookup("torch._not_in_the_table")


def sources(*folders: str) -> dict[Path, str]:
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {path: path.read_text(encoding="utf-8") for path in paths if path.name != "private_names.py"}


def test_every_row_is_used():
    words = {
        word for text in sources("tunecompile", "passes", "templates").values() for word in re.findall(r"\w+", text)
    }
    assert [row.name for row in (*PRIVATE_NAMES, *FOREIGN) if row.name.rpartition(".")[2] not in words] == []


class _Instances:
    annotated: int

    def __init__(self, given, kept):
        self.kept = kept


def test_an_argument_is_no_attribute_of_instances():
    """torch 2.15's FSDP2 goes on taking a policy that its groups no longer have."""
    for name, there in (("kept", True), ("annotated", True), ("given", False), ("__init__", True), ("other", False)):
        row = PrivateName(f"{__name__}._Instances.{name}", "", since="2.11", last_checked=("2.13",))
        assert lookup.is_there(row) is there, name


def test_every_private_name_of_torch_is_in_the_table():
    """Attributes by their dotted names; imports would end `import tunecompile` where a name is gone."""
    known = {prefix for row in PRIVATE_NAMES for prefix in _prefixes(row.name)} | {"torch.utils._pytree.tree_leaves"}
    for path, text in sources("tunecompile/_torch").items():
        tree = ast.parse(text)
        for node in _run(tree):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                assert not any(_is_private(name) for name in names), f"{path}:{node.lineno}"
            elif isinstance(node, ast.Attribute) and _is_private(name := ast.unparse(node)):
                assert name in known or "torch.utils._pytree".startswith(name), f"{path}:{node.lineno}: {name}"


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _is_private(name: str) -> bool:
    return name.startswith("torch.") and any(part.startswith("_") and part[1:2] != "_" for part in name.split("."))


def _run(node: ast.AST):
    """Nodes that run: not those that are for type checkers."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        for child in node.orelse:
            yield from _run(child)
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _run(child)
