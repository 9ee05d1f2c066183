"""The house keeps its shape: imports go down, private names of torch stay in one place, folders stay small."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: low to high; a package imports only from lines above its own
LEVELS = (
    "errors _torch",
    "ir templates",
    "ops planner",
    "compiler integrations",
    "passes runtime",
    "verification report estimate export",
    "api",
    "__init__",
    "cli",
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names.split()}
PRIVATE = re.compile(
    r"torch\._(?!scaled_mm|foreach|ops)|torch\.(?!utils\._pytree)\w+\._\w|_compiled_call_impl|\._call_impl|sys\._getframe"
)
LARGEST = 16  #: files in a folder
WIDE = ("cli/compare",)  #: whose files are one command


def sources(root: Path) -> dict[str, str]:
    """Path inside the package -> source, of `tunecompile` with `passes` and `templates`."""
    found = {}
    for folder, prefix in ((root / "tunecompile", ""), (root / "passes", "passes/"), (root / "templates", "templates/")):
        for file in folder.rglob("*.py"):
            path = file.relative_to(folder)
            if "__pycache__" not in path.parts and not (prefix == "" and path.parts[0] in ("passes", "templates")):
                found[prefix + path.as_posix()] = file.read_text(encoding="utf-8")
    return found


def top(name: str) -> str:
    """The package that a path or a dotted name is in."""
    return re.split(r"[./]", name)[0]


def imports(path: str, source: str, packages: set[str]) -> Iterator[str]:
    """Packages of ours that a file imports: `ast.walk`, so that late imports and those under TYPE_CHECKING count, too."""
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield "a relative import"
        elif isinstance(node, ast.ImportFrom) and node.module == "tunecompile":
            yield from (alias.name if alias.name in packages else "__init__" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tunecompile."):
            yield top(node.module.removeprefix("tunecompile."))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "tunecompile":
                    yield top(alias.name.removeprefix("tunecompile").lstrip(".") or "__init__")


def upward(files: dict[str, str]) -> list[str]:
    """Imports that do not go down."""
    packages = {top(path).removesuffix(".py") for path in files}
    wrong = []
    for path, source in sorted(files.items()):
        own = top(path)
        for other in imports(path, source, packages):
            if other != own and LEVEL.get(other, len(LEVELS)) >= LEVEL[own]:
                wrong.append(f"{path} -> {other}")
    return wrong


def test_imports_go_down():
    assert upward(sources(ROOT)) == []
