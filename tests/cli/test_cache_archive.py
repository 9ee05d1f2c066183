"""Caches travel in one file: whole, with the sum that was told, and only to a machine of the same kind."""

import hashlib
import json
import os
import stat
import subprocess
import sys
import zipfile

import pytest
from typer.testing import CliRunner

from tunecompile.cli import cache_archive
from tunecompile.cli.main import app
from tunecompile.errors import CacheDiffers, NotACache, NothingToSave, WrongCache

FILES = {
    "inductor/fxgraph/ab/key/entry": b"graph",
    "inductor/tunecompile/attention-1.json": b"{}",
    "triton/k/k.cubin": b"cu",
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Changes to another machine's folders, empty ones."""

    def change(name):
        for variable, folder in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
            monkeypatch.setenv(variable, str(tmp_path / name / folder))
        return tmp_path / name

    return change


@pytest.fixture
def saved(machine, tmp_path):
    """A file of one machine, and its sum; this one is another machine."""
    here = machine("first")
    for name, content in {**FILES, "inductor/locks/a.lock": b"", "inductor/tunecompile/turns/x": b""}.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(content)
    path = tmp_path / "out" / "caches.zip"
    made = cache_archive.save(path)
    assert made.files == len(FILES) and made.size == sum(map(len, FILES.values()))
    machine("second")
    return path, made.digest


def written(path, contents, **changes):
    """An archive with a right manifest, except for `changes`; and its sum."""
    manifest = {"made_by": cache_archive.describe(False), **changes}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
        archive.writestr(cache_archive.MANIFEST, json.dumps(manifest))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def files_in(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_what_was_saved_is_there(saved, machine):
    here = machine("second")
    assert cache_archive.load(*saved).files == len(FILES)
    assert files_in(here) == FILES
    assert stat.S_IMODE((here / "inductor/fxgraph").stat().st_mode) == 0o700 or os.name == "nt"
    again = cache_archive.load(saved[0], f" {saved[1].upper()}\n")
    assert again.kept == len(FILES)


def test_files_that_are_there_stay(saved, machine):
    own = machine("second") / "inductor/fxgraph/ab/key/entry"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"mine")
    assert cache_archive.load(*saved).kept == 1 and own.read_bytes() == b"mine"


def test_triton_inside_of_inductors_folder(saved, machine, monkeypatch):
    here = machine("second")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(here / "inductor" / "triton"))
    cache_archive.load(*saved)
    assert (here / "inductor/triton/k/k.cubin").read_bytes() == b"cu"


def test_another_file_is_not_read(saved, machine, tmp_path):
    path, digest = saved
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(WrongCache, match=digest):
        cache_archive.load(path, digest)
    with pytest.raises(NotACache, match="No such file"):
        cache_archive.load(tmp_path / "none.zip", digest)
    (no_zip := tmp_path / "text").write_text("text")
    with pytest.raises(NotACache, match="zip"):
        cache_archive.load(no_zip, hashlib.sha256(b"text").hexdigest())
    assert not files_in(machine("second"))


@pytest.mark.parametrize("key", ["tunecompile", "torch", "triton", "cuda", "python", "gpu", "cpu"])
def test_other_versions_and_gpus_are_refused(key, tmp_path, machine):
    here = machine("second")
    made_by = cache_archive.describe(native=key == "cpu")
    made_by[key] = ["NVIDIA Other, (1, 0)"] if key == "gpu" else "other"
    with pytest.raises(CacheDiffers, match=f"{key} .*[oO]ther"):
        cache_archive.load(*written(tmp_path / "file", FILES, made_by=made_by))
    assert not files_in(here)


@pytest.mark.parametrize(
    "name, place",
    [
        ("inductor/../../escaped", "inductor/escaped"),
        ("inductor/a/../../../../b", "inductor/a/b"),
        ("/inductor/x", None),
        ("inductor", None),
        ("other/x", None),
        ("../inductor/x", None),
    ],
)
def test_no_file_leaves_its_folder(name, place, tmp_path, machine):
    machine("second")
    cache_archive.load(*written(tmp_path / "file", {name: b"x"}))
    assert sorted(files_in(tmp_path)) == sorted(["file", *[f"second/{place}"] * (place is not None)])


def test_damaged_archives(tmp_path, machine):
    machine("second")
    for made_by in (None, 3, "text"):
        with pytest.raises(NotACache):
            cache_archive.load(*written(tmp_path / "file", {"inductor/x": b"x"}, made_by=made_by))
    content = (
        written(tmp_path / "file", {"inductor/x": b"some bytes"})[0].read_bytes().replace(b"some bytes", b"others")
    )
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(NotACache):
        cache_archive.load(tmp_path / "file", hashlib.sha256(content).hexdigest())
    assert [*files_in(tmp_path)] == ["file"]


def test_empty_caches(machine, tmp_path):
    machine("first")
    with pytest.raises(NothingToSave, match="first"):
        cache_archive.save(tmp_path / "file")
    assert not files_in(tmp_path)


def test_the_commands(saved, machine):
    machine("first")
    told = CliRunner().invoke(app, ["cache", "save", str(saved[0])])
    assert told.exit_code == 0 and (digest := told.output.split("--sha256 ")[1].strip())
    machine("second")
    assert CliRunner().invoke(app, ["cache", "load", str(saved[0]), "--sha256", digest]).exit_code == 0
    assert CliRunner().invoke(app, ["cache", "load", str(saved[0])]).exit_code != 0
    wrong = CliRunner().invoke(app, ["cache", "load", str(saved[0]), "--sha256", "0" * 64])
    assert wrong.exit_code == 2 and "SHA-256" in wrong.output + wrong.stderr


STEP = """
import torch, tunecompile
from torch import nn
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return x + self.linear(x).tanh()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
model = tunecompile.optimize(Model())
model(torch.randn(2, 8)).sum().backward()
(region,) = tunecompile.report(model).regions
assert region.compiles, tunecompile.report(model).notes
print(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"], torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_code_of_one_machine_runs_on_the_next(machine, tmp_path):
    def step():
        done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return tuple(map(int, done.stdout.split()))

    machine("first")
    misses, _ = step()
    assert misses
    made = cache_archive.save(tmp_path / "file")
    machine("second")
    cache_archive.load(tmp_path / "file", made.digest)
    assert step()[0] == 0
