"""Versions, workflows and images: they name what there is. Slow: what a release uploads is built and installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import tunecompile
from docs import release

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def test_a_tag_is_the_version_and_has_notes():
    assert release.version() == tunecompile.__version__ and release.notes(tunecompile.__version__)
    assert release.faults(f"v{tunecompile.__version__}") == []
    assert len(release.faults("v9.9.9")) == 1 and "9.9.9" in release.faults("v9.9.9")[0]
    assert release.notes("9.9.9") == "" and "## " not in release.notes(tunecompile.__version__).replace("### ", "")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_what_there_is(workflow):
    """Targets of make, files, and Pythons that the package takes; each job with a limit, and few rights."""
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert found["permissions"] == {"contents": "read"} and found[True], "yaml reads `on` as True"
    oldest = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    for job in found["jobs"].values():
        assert job["timeout-minutes"] <= 60
        cells = job.get("strategy", {}).get("matrix", {})
        pythons = [*cells.get("python", []), *(each.get("python", "3.11") for each in cells.get("include", []))]
        assert all(int(python.partition(".")[2]) >= int(oldest) for python in pythons)
        assert set(cells.get("host", [])) in (set(), {file.stem for file in (ROOT / "tests" / "hosts").glob("*.txt")})
        for step in job["steps"]:
            assert set(re.findall(r"\bmake ([\w-]+)", step.get("run", ""))) <= targets, step
            files = re.findall(r"(?:^|python )(\S+/\w+(?:\.py)?)(?= |$)", step.get("run", ""))
            assert all((ROOT / file).is_file() for file in files), step
            assert "${{ github.event" not in step.get("run", ""), "text of others in a shell"


def test_images_name_what_there_is():
    text = (ROOT / "docs" / "docker" / "Dockerfile").read_text(encoding="utf-8")
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for name in line.split()]
    assert copied and all((ROOT / name).exists() for name in copied)
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert container["postCreateCommand"] == "make .venv/.ready"
    assert "$(VENV)/.ready:" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Source archive, and the wheel that is made of it."""
    folder = tmp_path_factory.mktemp("dist")
    hook = f"import setuptools.build_meta as b; b.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", hook], cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, archive]
    subprocess.run(command, check=True)
    return folder


@pytest.mark.slow
def test_the_archive_has_all_that_the_wheel_has(built):
    (archive,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    names = {Path(name).name for name in tarfile.open(archive).getnames()}
    packed = [name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name]
    assert len(packed) > 300 and {Path(name).name for name in packed} <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    metadata = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert f"Version: {tunecompile.__version__}" in text and "Description-Content-Type: text/markdown" in text


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_installs(version, built, tmp_path):
    """Into each Python that is there: every file compiles, and the command says what it lacks."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version}")
    alone = dict(
        cwd=tmp_path, env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, text=True
    )
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True, **alone)
    inside = tmp_path / "venv" / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    pip = [inside, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, **alone)
    where = [inside, "-c", "import importlib.util as u; print(*u.find_spec('tunecompile').submodule_search_locations)"]
    folder = subprocess.run(where, check=True, capture_output=True, **alone).stdout.strip()
    compiled = subprocess.run(
        [inside, "-W", "error", "-m", "compileall", "-q", "-f", folder], capture_output=True, **alone
    )
    assert compiled.returncode == 0, compiled.stdout
    told = subprocess.run([inside, "-c", "import tunecompile; tunecompile.optimize"], capture_output=True, **alone)
    assert "No module named 'torch'" in told.stderr, told.stderr[-500:]
    assert (tmp_path / "venv" / "bin" / "tunecompile").exists()


def interpreter(version: str) -> str | None:
    """A Python of this version: on the path, or of pyenv."""
    found = [
        shutil.which(f"python{version}"),
        *sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))),
    ]
    for python in filter(None, reversed(found)):
        asked = subprocess.run([python, "-c", "import sys; print(sys.version)"], capture_output=True, text=True)
        if asked.returncode == 0 and asked.stdout.startswith(version):
            return os.path.realpath(python)
    return None
