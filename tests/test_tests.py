"""Tests share helpers by `tests.support` and fixtures by conftest.py: no file reads names from a file of tests."""

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def imported(code: str) -> list[str]:
    """Modules that the code imports, late imports and those of code in strings included."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
            found += strings(node.value)
    return found


def strings(text: str) -> list[str]:
    try:
        return imported(text)
    except SyntaxError:
        return []


def shared(code: str) -> list[str]:
    return [
        module
        for module in imported(code)
        if module.startswith("tests.")
        and any(part.startswith("test_") or part == "conftest" for part in module.split("."))
    ]


def test_no_test_imports_from_a_test():
    files = {*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")} - {Path(__file__)}
    assert len(files) > 100
    assert {
        str(path.relative_to(ROOT)): found for path in sorted(files) if (found := shared(path.read_text("utf-8")))
    } == {}


@pytest.mark.parametrize(
    "code",
    [
        "from tests.ops.test_lora import arguments",
        "from tests.ops import test_lora",
        "def late():\n    import tests.ops.test_lora",
        "STEP = '''\nfrom tests.models.test_gpu import build\n'''",
        "from tests.passes.conftest import check",
    ],
)
def test_it_would_be_seen(code):
    assert shared(code)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_takes_the_name_of_one_test():
    name = "tests/ops/test_lora.py::test_stacked[two:1]"
    made = subprocess.run(["make", "-n", "test", f"ARGS={name}"], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0 and name in made.stdout, made.stderr
