"""Compiled code is looked up by all that it depends on: our source, the passes, the plan."""

import importlib.util
from types import SimpleNamespace

import pytest

from tunecompile.compiler import partitioner
from tunecompile.compiler.partitioner import HASHED, Lowering, Partitioner, source_hash
from tunecompile.compiler.pass_manager import Context
from tunecompile.passes import PIPELINE
from tunecompile.planner.solver import KEEP, Plan


@pytest.fixture
def sources(monkeypatch, tmp_path):
    """Folders that stand for the packages, and a function that hashes them."""
    for package in (*HASHED, "cli"):
        (tmp_path / package / "deeper").mkdir(parents=True)
        (tmp_path / package / "one.py").write_text(f"a = {package!r}")
        (tmp_path / package / "deeper" / "two.py").write_text("b = 2")

    def found(name):
        return SimpleNamespace(submodule_search_locations=[str(tmp_path / name.removeprefix("tunecompile."))])

    def hashed():
        with monkeypatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", found)
            return source_hash.__wrapped__()

    return tmp_path, hashed


@pytest.mark.parametrize("package", HASHED)
@pytest.mark.parametrize("file", ["one.py", "deeper/two.py"])
def test_a_file_that_changes(sources, package, file):
    root, hashed = sources
    before = hashed()
    assert hashed() == before
    (root / package / file).write_text("a = 3")
    assert hashed() != before


def renamed(package):
    (package / "one.py").rename(package / "other.py")


def moved(package):
    (package / "deeper" / "two.py").rename(package / "two.py")


def swapped(package):
    one, two = package / "one.py", package / "deeper" / "two.py"
    texts = one.read_text(), two.read_text()
    one.write_text(texts[1])
    two.write_text(texts[0])


def added(package):
    (package / "new.py").write_text("")


def removed(package):
    (package / "one.py").unlink()


@pytest.mark.parametrize("change", [renamed, moved, swapped, added, removed])
def test_files_that_move_come_or_go(sources, change):
    root, hashed = sources
    before = hashed()
    change(root / "passes")
    assert hashed() != before


def test_what_no_code_depends_on_is_not_hashed(sources):
    root, hashed = sources
    before = hashed()
    (root / "cli" / "one.py").write_text("a = 3")
    assert hashed() == before


def test_the_packages_are_found_where_they_are_installed(monkeypatch):
    """`passes` and `templates` lie beside the package in a checkout, and in it once installed."""
    expected, read = source_hash(), []
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: read.append(find(name)) or read[-1])
    assert source_hash.__wrapped__() == expected
    assert [spec.name for spec in read] == [f"tunecompile.{package}" for package in HASHED]


PLANS = [
    KEEP,
    Plan(None),
    Plan(frozenset({0})),
    Plan(frozenset({1})),
    Plan(tiles=2),
    Plan(weights=True),
    Plan(None, attention=True),
]


@pytest.mark.parametrize("hook", [Partitioner, Lowering])
def test_the_key_differs_for_every_plan(hook):
    keys = {hook(PIPELINE, Context("r", plan)).uuid() for plan in PLANS}
    assert len(keys) == len(PLANS) and None not in keys


@pytest.mark.parametrize("hook", [Partitioner, Lowering])
def test_the_key_differs_for_other_source_and_other_passes(hook, monkeypatch):
    key = hook(PIPELINE, Context("r")).uuid()
    assert hook(PIPELINE, Context("another region")).uuid() == key
    assert hook(PIPELINE[1:], Context("r")).uuid() != key
    monkeypatch.setattr(partitioner, "source_hash", lambda: "other")
    assert hook(PIPELINE, Context("r")).uuid() != key
