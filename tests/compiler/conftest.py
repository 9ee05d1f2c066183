"""Packages of passes, installed for one test."""

from __future__ import annotations

import sys

import pytest

from tests.support.plugins import HEADER, fresh


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(name, code) puts a package there as pip would; its entry point by that name is PASSES of the code."""
    monkeypatch.delenv("TUNECOMPILE_PASSES", raising=False)
    made = []

    def write(name: str, code: str, version: str = "1.2") -> None:
        folder = tmp_path / f"site{len(made)}"
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}.py").write_text(HEADER + code + fresh())
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[tunecompile.passes]\n{name} = {name}:PASSES\n")
        made.append(name)
        monkeypatch.syspath_prepend(folder)

    yield write
    for name in made:
        sys.modules.pop(name, None)
