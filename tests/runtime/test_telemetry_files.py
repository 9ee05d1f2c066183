"""Which files of a monitor's folder are read, and in which order."""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import fields

import pytest

from tunecompile.errors import UnsafeFolder
from tunecompile.runtime import telemetry_files
from tunecompile.runtime.telemetry_files import ASKED, Status, folder, lives, read_all, write

#: numbers whose order as words is another one
FEWER, MORE = 9, 10


@pytest.fixture(autouse=True)
def all_live(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(telemetry_files, "lives", lambda status: status.pid in (FEWER, MORE))
    telemetry_files.ask()


def status(pid, model="", updated=0.0):
    return Status(**{**{each.name: None for each in fields(Status)}, "pid": pid, "updated": updated, "model": model})


def test_they_are_in_the_order_of_numbers_and_models():
    for number, (pid, model) in enumerate([(MORE, "A"), (FEWER, "C"), (FEWER, "B")]):
        path = write(status(pid, model), f"{pid}-{number}.json")
        assert path.parent == folder() and path.exists()
    assert [(found.pid, found.model) for found in read_all()] == [(FEWER, "B"), (FEWER, "C"), (MORE, "A")]


def test_what_no_living_process_wrote_is_removed():
    kept = [f"{FEWER}-a.json", f"{MORE}-b.tmp", "other", ASKED]
    write(status(FEWER), kept[0])
    write(status(7), "7-a.json")
    for name in (*kept[1:3], f"{FEWER}-d.json"):
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
    assert lives(status(os.getpid(), updated=time.time())) and not lives(status(os.getpid(), updated=1e9))
    assert not lives(status(2**22 + 1, updated=time.time())), "no system counts so far"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    assert not lives(status(dead.pid, updated=time.time())), "it has ended, and nobody has collected it"
    dead.wait()
