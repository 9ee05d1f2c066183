"""`tunecompile new-pass` and `check-pass`: write a package with a working pass, and load passes to check them."""

from __future__ import annotations

import importlib
import importlib.util
import keyword
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from types import ModuleType

from tunecompile.compiler.pass_manager import Pass
from tunecompile.errors import NoSuchPass
from tunecompile.verification.check_pass import Example

FILES = {
    "pyproject.toml": "pyproject.toml",
    "package.py": "{name}/__init__.py",
    "test.py": "test_{name}.py",
    "benchmark.py": "benchmark.py",
}


def write(name: str, folder: Path) -> list[Path]:
    """Write the files of a package called `name` to a new folder, and return their paths.

    Raises:
        NoSuchPass: the name is no Python identifier, or the folder is not empty.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or not name.islower():
        raise NoSuchPass(
            given=name, reason="it is no name of a Python package: use lower case letters, digits and underscores"
        )
    if folder.exists() and any(folder.iterdir()):
        raise NoSuchPass(given=name, reason=f"{folder} is not empty. Give another --out")
    made = []
    for source, target in FILES.items():
        path = folder / target.format(name=name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template((Path(__file__).parent / f"{source}.txt").read_text()).substitute(name=name))
        made.append(path)
    return made


def load(target: str) -> tuple[list[Pass], Sequence[Example]]:
    """PASSES (or PASS) and EXAMPLES of a module, given by name, file, folder, or the folder of its project.

    Raises:
        NoSuchPass: there is no such module, it cannot be imported, or it lacks one of the two.
    """
    module = _imported(target)
    passes = getattr(module, "PASSES", None) or [p for p in [getattr(module, "PASS", None)] if p is not None]
    passes = [passes] if isinstance(passes, Pass) else list(passes)
    if not passes or not all(isinstance(p, Pass) for p in passes):
        raise NoSuchPass(given=target, reason="it has no PASSES, a list of `tunecompile.Pass`")
    examples = getattr(module, "EXAMPLES", ())
    if not examples or not all(isinstance(example, Example) for example in examples):
        raise NoSuchPass(
            given=target, reason="it has no EXAMPLES, a list of `tunecompile.Example`, to check its passes with"
        )
    return passes, examples


def _imported(target: str) -> ModuleType:
    path = Path(target)
    if path.is_dir() and not (path / "__init__.py").exists():
        inner = [child for child in sorted(path.iterdir()) if (child / "__init__.py").exists()]
        if len(inner) != 1:
            raise NoSuchPass(given=target, reason=f"it contains {len(inner)} packages. Name one")
        path = inner[0]
    file = path / "__init__.py" if path.is_dir() else path
    try:
        if not file.is_file():
            return importlib.import_module(target)
        name = path.stem if path.is_dir() or path.stem != "__init__" else path.parent.name
        spec = importlib.util.spec_from_file_location(
            name, file, submodule_search_locations=[str(path)] if path.is_dir() else None
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    except Exception as error:
        raise NoSuchPass(given=target, reason=f"it cannot be imported: {type(error).__name__}: {error}") from error
