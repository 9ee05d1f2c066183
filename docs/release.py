"""A release's version and notes: `check TAG` compares a tag with package and changelog, `notes` prints the latter."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def version() -> str:
    """The version of `tunecompile/__init__.py`, the one place that has it; read without an import."""
    tree = ast.parse((ROOT / "tunecompile" / "__init__.py").read_text(encoding="utf-8"))
    return next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__"
    )


def notes(of: str) -> str:
    """The section of a version in the changelog; empty where there is none."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(of)}\b[^\n]*\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return found[1].strip() if found else ""


def faults(tag: str) -> list[str]:
    """What keeps a tag from being released."""
    now = version()
    found = [] if tag == f"v{now}" else [f"the tag is {tag}, and the version in tunecompile/__init__.py is {now}"]
    return found if notes(now) else [*found, f"CHANGELOG.md has no section {now}"]


if __name__ == "__main__":
    if sys.argv[1] == "notes":
        print(notes(version()))
    elif wrong := faults(sys.argv[2]):
        sys.exit("\n".join(wrong))
