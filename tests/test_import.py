"""`import tunecompile` costs nothing beyond `import torch`; its names are there when they are read."""

import ast
import subprocess
import sys
from pathlib import Path

import tunecompile

LIGHT = """
import sys, torch
before = {name.partition(".")[0] for name in sys.modules} | {name for name in sys.modules if name.startswith("torch.")}
import tunecompile
dir(tunecompile), tunecompile.__version__, tunecompile.errors.NotAModule
heavy = "torch._dynamo torch._inductor torch._functorch sympy triton transformers peft bitsandbytes".split()
print(*[name for name in heavy if name in sys.modules and name not in before])
print(*[name for name in sys.modules if name.startswith("tunecompile.") and not name.startswith("tunecompile.errors")])
"""

HIDDEN = """
import tunecompile.report.report, tunecompile.estimate.engines, tunecompile.api
from tunecompile import estimate, report
assert estimate is tunecompile.estimate and report is tunecompile.report is tunecompile.api.report
assert callable(report) and callable(estimate)
"""


def run(script: str) -> str:
    """What the script prints in a process of its own."""
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout


def test_import_loads_no_compiler():
    assert run(LIGHT).split() == []


def test_packages_do_not_hide_functions_of_their_name():
    run(HIDDEN)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(tunecompile.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == {name: f"tunecompile.{module}" for name, module in tunecompile.HOMES.items()}


def test_names_are_those_of_their_modules(monkeypatch):
    assert set(tunecompile.__all__) <= set(dir(tunecompile))
    for name, module in tunecompile.HOMES.items():
        value = getattr(tunecompile, name)
        assert value is getattr(sys.modules[f"tunecompile.{module}"], name) and not hasattr(value, "__path__"), name
    assert tunecompile.errors.__name__ == "tunecompile.errors"
    assert not hasattr(tunecompile, "optimise")
    monkeypatch.setattr(tunecompile, "optimize", print)
    assert tunecompile.optimize is print
    monkeypatch.undo()
    assert tunecompile.optimize is sys.modules["tunecompile.api"].optimize
