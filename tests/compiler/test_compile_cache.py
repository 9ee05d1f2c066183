"""A cache folder that several users share."""

import os
from types import SimpleNamespace

import pytest
import torch

from tunecompile.compiler import compile_cache


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """One that is shared, and torch's default one."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    (shared / "fxgraph" / "ab").mkdir(parents=True)
    (shared / "locks").mkdir()
    (shared / "locks" / "x.lock").touch()
    (shared / "fxgraph" / "ab" / "code").write_text("theirs")
    monkeypatch.setenv(compile_cache.FOLDER, str(shared))
    monkeypatch.setattr(compile_cache, "default_cache_folder", lambda: own)
    return shared, own


def read_only(monkeypatch, *closed):
    """To root nothing is."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path not in closed and access(path, mode))


def test_what_is_read_only_is_linked(folders, monkeypatch):
    shared, own = folders
    read_only(monkeypatch, shared)
    (own / "fxgraph").mkdir(parents=True)
    (own / "fxgraph" / "mine").write_text("mine")
    (said,) = compile_cache.link_read_only()
    assert os.environ[compile_cache.FOLDER] == str(own) and str(own) in said
    assert (own / "fxgraph" / "ab" / "code").read_text() == "theirs" and (
        own / "fxgraph" / "mine"
    ).read_text() == "mine"
    assert not (own / "locks").exists()
    monkeypatch.setenv(compile_cache.FOLDER, str(shared))
    assert compile_cache.link_read_only() == [said]  # another rank, or the next run
    assert compile_cache.link_read_only() == []


def test_what_can_be_written_is_used(folders, monkeypatch):
    assert compile_cache.link_read_only() == [] and os.environ[compile_cache.FOLDER] == str(folders[0])
    monkeypatch.delenv(compile_cache.FOLDER)
    assert compile_cache.link_read_only() == []


def test_where_nothing_can_be_written(folders, monkeypatch):
    read_only(monkeypatch, *folders)
    (said,) = compile_cache.link_read_only()
    assert said.startswith("neither ") and os.environ[compile_cache.FOLDER] == str(folders[0])


def test_a_folder_that_cannot_be_made_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert not compile_cache._writable(tmp_path / "file" / "below")
    assert compile_cache._writable(tmp_path / "new" / "below") and (tmp_path / "new" / "below").is_dir()


# -- ranks take turns -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Several ranks with one cache folder, whose waits are counted: (how often they looked, what happens meanwhile)."""
    told = SimpleNamespace(looks=0, meanwhile=lambda: None)

    def sleep(seconds):
        told.looks += 1
        told.meanwhile()

    monkeypatch.setattr(compile_cache, "several", lambda: True)
    monkeypatch.setattr(compile_cache, "keeps_code", lambda: True)
    monkeypatch.setattr(compile_cache, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compile_cache, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: told.looks))
    return told


def turn(change=None, uuid="code"):
    graph = torch.fx.symbolic_trace(change or torch.nn.Identity())
    return compile_cache.in_turn(lambda: uuid, graph, [torch.ones(2), 3])


def test_the_first_rank_compiles_and_others_wait_for_it(ranks):
    first, second = turn(), turn()
    first.__enter__()
    assert ranks.looks == 0, "the first waits for nobody"

    def meanwhile():
        if ranks.looks == 3:
            first.__exit__(None, None, None)

    ranks.meanwhile = meanwhile
    with second:
        assert ranks.looks == 3
        with turn():  # all ranks that waited go on together
            assert ranks.looks == 3


def test_no_rank_waits_for_ever(ranks):
    with turn(), turn():
        assert ranks.looks == compile_cache.LONGEST


@pytest.mark.parametrize("other", [{"change": torch.nn.ReLU()}, {"uuid": "other code"}, {"uuid": None}])
def test_nobody_waits_for_other_code(ranks, other):
    with turn(), turn(**other):
        assert ranks.looks == 0


@pytest.mark.parametrize("why", ["several", "keeps_code"])
def test_where_no_code_is_shared_nobody_waits(ranks, monkeypatch, why):
    monkeypatch.setattr(compile_cache, why, lambda: False)
    with turn(), turn():
        assert ranks.looks == 0
