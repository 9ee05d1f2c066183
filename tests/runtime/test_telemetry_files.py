"""Which files of a monitor's folder are read, and in which order."""

import os
import tempfile
from dataclasses import fields

import pytest

from tunecompile.errors import UnsafeFolder
from tunecompile.runtime import telemetry_files
from tunecompile.runtime.telemetry_files import ASKED, Status, born, folder, lives, read_all, write

#: numbers whose order as words is another one
FEWER, MORE = 9, 10


@pytest.fixture(autouse=True)
def all_live(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(telemetry_files, "lives", lambda pid, since=None: pid in (FEWER, MORE) and since in (None, 1))
    telemetry_files.ask()


def status(pid, model="", since=1):
    return Status(**{**{each.name: None for each in fields(Status)}, "pid": pid, "born": since, "model": model})


def test_they_are_in_the_order_of_numbers_and_models():
    for number, (pid, model) in enumerate([(MORE, "A"), (FEWER, "C"), (FEWER, "B")]):
        path = write(status(pid, model), f"{pid}-{number}.json")
        assert path.parent == folder() and path.exists()
    assert [(found.pid, found.model) for found in read_all()] == [(FEWER, "B"), (FEWER, "C"), (MORE, "A")]


def test_what_living_processes_did_not_write_is_removed():
    """A file of a dead process, of another's number, of a process that began at another time, and what is no status."""
    kept = [f"{FEWER}-a.json", f"{MORE}-b.tmp", "other", ASKED]
    write(status(FEWER), kept[0])
    write(status(7), "7-a.json")
    write(status(MORE), f"{FEWER}-b.json")
    write(status(FEWER, since=2), f"{FEWER}-c.json")
    for name in (*kept[1:3], f"{FEWER}-d.json", "7-e.tmp"):
        (folder() / name).write_text("{")
    assert read_all() == [status(FEWER)]
    assert sorted(path.name for path in folder().iterdir()) == sorted(kept)


def test_a_file_that_another_monitor_removed_is_no_error(monkeypatch):
    read = telemetry_files._read
    monkeypatch.setattr(telemetry_files, "_read", lambda path: (read(path), path.unlink())[0])
    write(status(7), "7-a.json")
    assert read_all() == []


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders have no owner")
def test_a_folder_that_others_may_enter_is_not_read():
    folder().chmod(0o755)
    with pytest.raises(UnsafeFolder, match=str(folder())):
        read_all()


def test_without_a_folder_nothing_was_written():
    (folder() / ASKED).unlink()
    folder().rmdir()
    assert read_all() == []


def test_a_process_is_known_by_its_beginning():
    assert lives(os.getpid()) and not lives(2**22 + 1), "no system counts so far"
    assert lives(os.getpid(), born(os.getpid())) and not lives(os.getpid(), -1)
