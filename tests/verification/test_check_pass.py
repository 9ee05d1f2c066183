"""From skeleton to a verified pass on the command line, and that each net fails for what it is there for."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tunecompile import Example, check
from tunecompile.cli.new_pass import load, write
from tunecompile.errors import NoSuchPass

pytestmark = pytest.mark.filterwarnings("ignore")


def skeleton(folder, name, *changes):
    """Its PASSES and EXAMPLES after changes to the source."""
    write(name, folder)
    file = folder / name / "__init__.py"
    text = file.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file.write_text(text)
    return load(str(folder))


def failed(passes, examples):
    return {f"{finding.net}: {finding.asked}" for finding in check(passes, examples) if not finding.passed}


def test_the_skeleton_holds_and_its_own_test_passes(tmp_path):
    typer = pytest.importorskip("typer.testing")
    from tunecompile.cli.main import app

    folder = tmp_path / "new"
    done = typer.CliRunner().invoke(app, ["new-pass", "capped_one", "--out", str(folder)])
    assert done.exit_code == 0 and (folder / "pyproject.toml").exists(), done.output
    done = typer.CliRunner().invoke(app, ["check-pass", str(folder)])
    assert done.exit_code == 0 and "all passed" in done.output and "FAILED" not in done.output, done.output
    for net in ("pass", "spelling", "near miss", "op", "model"):
        assert f"passed  {net}, plain" in done.output
    for file in ("test_capped_one.py", "benchmark.py"):
        compile((folder / file).read_text(), file, "exec")


@pytest.mark.slow
def test_the_skeletons_test_and_benchmark_run(tmp_path):
    write("capped_two", tmp_path / "new")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path / "new",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout[-3000:]
    done = subprocess.run(
        [sys.executable, "benchmark.py"], cwd=tmp_path / "new", capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0 and done.stdout.count(" ms") == 3, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
def test_a_wrong_gradient_is_found_by_every_net(tmp_path):
    found = failed(*skeleton(tmp_path, "wrong_sign", ("(1 - torch.tanh", "(1 + torch.tanh")))
    assert {
        "pass: right in float32",
        "op: wrong_sign: gradients are those of its values",
        "model: a training step is verified",
    } <= found
    assert any(asked.startswith("near miss") for asked in found) and not any("found in" in asked for asked in found)


@pytest.mark.slow
def test_a_pattern_that_holds_too_much_is_found_by_near_misses(tmp_path):
    """The two constants need not be equal for it to match."""
    found = failed(
        *skeleton(
            tmp_path,
            "too_wide",
            ("to=lambda x, cap: too_wide", "to=lambda x, cap, other: too_wide"),
            ("def capped(x, cap):", "def capped(x, cap, other):"),
            ("    return torch.tanh(x / cap) * cap\n\n\nPASSES", "    return torch.tanh(x / cap) * other\n\n\nPASSES"),
        )
    )
    assert found and all(asked.startswith("near miss") for asked in found), found


@pytest.mark.slow
def test_a_package_that_is_installed_elsewhere():
    """Its module is known by its folder; a plan pass of it takes no part in what is asked of graphs."""
    package = Path(__file__).parents[1] / "packages" / "squared_relu"
    done = subprocess.run(
        [sys.executable, "-m", "tunecompile", "check-pass", str(package)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(package.parent.parent.parent)},
    )
    assert done.returncode == 0 and "all passed" in done.stdout and "not run here: not on a GPU" in done.stdout, (
        done.stdout + done.stderr[-2000:]
    )


def test_an_example_that_does_not_run():
    findings = list(
        check([], [Example(lambda x: x.no_such_method(), lambda dtype: [torch.randn(3, dtype=dtype)], "broken")])
    )
    assert (
        len(findings) == 5
        and not any(finding.passed for finding in findings)
        and "no_such_method" in findings[0].detail
    )


@pytest.mark.parametrize(
    "target, reason",
    [
        ("no_such_module_anywhere", "cannot be imported"),
        ("json", "has no PASSES"),
        ("tunecompile.passes.recognize.swiglu", "has no EXAMPLES"),
    ],
)
def test_what_cannot_be_checked(target, reason):
    with pytest.raises(NoSuchPass, match=reason):
        load(target)


def test_what_cannot_be_written(tmp_path):
    with pytest.raises(NoSuchPass, match="no name of a Python package"):
        write("not-a-name", tmp_path / "new")
    (tmp_path / "file").write_text("")
    with pytest.raises(NoSuchPass, match="is not empty"):
        write("name", tmp_path)
    assert importlib.util.find_spec("tunecompile.cli.new_pass") is not None
