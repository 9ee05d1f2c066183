"""Measured choices on disk: the first that is stored holds, and what is damaged is as if it were not there."""

import json
import os
import tempfile

import pytest

from tunecompile.compiler import tuning_cache

KEY = {"gpu": "a card", "sizes": [1, 2]}


def number(value) -> bool:
    return isinstance(value, float)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))  # beside its name, or it could not be moved
    return tmp_path / "tunecompile"


def test_the_first_that_was_stored_holds(folder):
    assert tuning_cache.read("speed", KEY, number) is None
    assert tuning_cache.keep("speed", KEY, 1.0, number) == 1.0 == tuning_cache.keep("speed", KEY, 2.0, number)
    assert tuning_cache.read("speed", dict(reversed(KEY.items())), number) == 1.0
    assert tuning_cache.read("speed", {**KEY, "sizes": [1, 3]}, number) is None
    assert tuning_cache.read("length", KEY, number) is None and tuning_cache.keep("length", KEY, 3.0, number) == 3.0
    assert {file.suffix for file in folder.iterdir()} == {".json"} and len([*folder.iterdir()]) == 2


@pytest.mark.parametrize("content", ["", "[]", '{"key": 1}', '{"key": 1, "value": 1.0}', None])
def test_what_is_damaged_is_written_anew(folder, content):
    tuning_cache.keep("speed", KEY, 1.0, number)
    (file,) = folder.iterdir()
    file.write_text(json.dumps({"key": KEY, "value": "fast"}) if content is None else content)
    assert tuning_cache.read("speed", KEY, number) is None
    assert tuning_cache.keep("speed", KEY, 2.0, number) == 2.0 == tuning_cache.read("speed", KEY, number)


@pytest.mark.parametrize("error, holds", [(FileExistsError, 1.0), (PermissionError, 2.0)])
def test_another_writer_and_folders_without_hard_links(folder, monkeypatch, error, holds):
    """One that came in between has won; where nothing can be linked, the last one does. No file is left over."""
    tuning_cache.keep("speed", KEY, 1.0, number)

    def link(source, target):
        raise error

    monkeypatch.setattr(os, "link", link)
    assert tuning_cache.keep("speed", KEY, 2.0, number) == holds
    assert [file.suffix for file in folder.iterdir()] == [".json"]


def test_a_folder_that_cannot_be_written(folder):
    folder.write_text("a file")
    assert tuning_cache.keep("speed", KEY, 2.0, number) == 2.0 and tuning_cache.read("speed", KEY, number) is None
