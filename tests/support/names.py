"""Names of this repository that a file reads or replaces and that are not there, found in the source: nothing is imported."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"tunecompile.passes": "passes", "tunecompile.templates": "templates"}  #: as the package mapping has them
BY_NAME = {"setattr", "delattr", "getattr", "object"}  #: of monkeypatch, of Python and of mock.patch
PLAIN = {"object", "ABC", "Protocol", "NamedTuple", "Generic"}  #: bases that no test reads a name of
ANY = frozenset({"*"})
Place = tuple[str, "ast.Module | ast.ClassDef"]  #: a module, or a class and the module that it stands in


def top(name: str) -> str:
    return name.partition(".")[0]


@functools.cache
def file_of(module: str) -> Path | None:
    """The file of a module of this repository."""
    for package, folder in ELSEWHERE.items():
        if module == package or module.startswith(f"{package}."):
            module = folder + module[len(package) :]
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


def directly_in(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module or the body of a class does, so not what is in functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from directly_in(child)


@functools.cache
def bindings(owner: ast.Module | ast.ClassDef) -> dict[str, ast.AST]:
    """What a module or a class binds: by name, what binds it."""
    found: dict[str, ast.AST] = {}
    for node in directly_in(owner):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or top(alias.name): node for alias in node.names}
    inner = ast.walk(owner)
    if isinstance(owner, ast.Module):
        return found | {name: node for node in inner if isinstance(node, ast.Global) for name in node.names}
    stored = (node for node in inner if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr: node for node in stored} | found


def module(name: str) -> Place | None:
    file = file_of(name)
    return (name, parsed(file)) if file else None


def member(place: Place, name: str) -> Place | None:
    """The module or class of ours that a name of a module or class is; None for all else."""
    inside, owner = place
    binding = bindings(owner).get(name)
    if isinstance(binding, ast.ClassDef):
        return inside, binding
    if isinstance(binding, ast.ImportFrom) and binding.module and not binding.level:
        there = next((alias.name for alias in binding.names if alias.asname == name), name)
        if (binding.module, there) != (inside, name):
            return (above := module(binding.module)) and member(above, there)
        binding = None  # a package imports a module of its own
    return module(f"{inside}.{name}") if binding is None and isinstance(owner, ast.Module) else None


def names(place: Place) -> frozenset[str]:
    """What a module or class of ours has; `ANY` where that is not to be seen in the source."""
    inside, owner = place
    own = frozenset(bindings(owner))
    own |= ANY & own | (ANY if "__getattr__" in own else frozenset())
    for base in owner.bases if isinstance(owner, ast.ClassDef) else ():
        said = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        if said.rpartition(".")[2] not in PLAIN:
            above = functools.reduce(lambda at, part: at and member(at, part), said.split("."), module(inside))
            own |= names(above) if above else ANY
    return own


def has(place: Place, name: str) -> bool:
    if name.startswith("__") or {name, *ANY} & names(place):
        return True
    return isinstance(place[1], ast.Module) and file_of(f"{place[0]}.{name}") is not None


def missing(code: str) -> Iterator[str]:
    """Names of ours that code imports, reads or replaces, late and in strings included, and that are not there."""
    nodes = list(ast.walk(ast.parse(code)))
    means: dict[str, Place | None] = {}  #: what a local name stands for
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if file_of(top(alias.name)) and not file_of(alias.name))
            means |= {
                alias.asname or top(alias.name): module(alias.name if alias.asname else top(alias.name))
                for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and file_of(top(node.module)):
            place = module(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names if not (place and has(place, alias.name)))
            means |= {alias.asname or alias.name: place and member(place, alias.name) for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import " in node.value:
            with contextlib.suppress(SyntaxError):
                yield from missing(node.value)
    for name in bound(nodes):
        means.pop(name, None)
    for owner, name in (read for node in nodes for read in reads(node)):
        if (place := place_of(owner, means)) and not has(place, name):
            yield f"{ast.unparse(owner)}.{name}"


def bound(nodes: list[ast.AST]) -> set[str]:
    """Names that code binds otherwise than by an import."""
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return stored | defined | {node.arg for node in nodes if isinstance(node, ast.arg)}


def place_of(node: ast.expr, means: dict[str, Place | None]) -> Place | None:
    """The module or class of ours that an expression is."""
    if isinstance(node, ast.Constant) and str(node.value).startswith("tunecompile."):
        first, *parts = str(node.value).split(".")
        return functools.reduce(lambda at, part: at and member(at, part), parts, module(first))
    if isinstance(node, ast.Attribute):
        above = place_of(node.value, means) if isinstance(node.value, (ast.Name, ast.Attribute)) else None
        return above and member(above, node.attr)
    return means.get(node.id) if isinstance(node, ast.Name) else None


def reads(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """(expression, attribute of it), where one is read, or given by its name to a function such as `setattr`."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.value, node.attr
    elif isinstance(node, ast.Call) and not any(keyword.arg in ("raising", "create") for keyword in node.keywords):
        called = getattr(node.func, "attr", getattr(node.func, "id", None))
        texts = [argument.value if isinstance(argument, ast.Constant) else None for argument in node.args[:2]]
        if called not in BY_NAME or not texts or (called == "getattr" and len(node.args) > 2):
            return
        if isinstance(texts[-1], str) and len(texts) == 2:
            yield node.args[0], texts[1]
        elif isinstance(texts[0], str) and texts[0].startswith("tunecompile."):  # the owner and the name in one text
            owner, _, name = texts[0].rpartition(".")
            yield ast.Constant(owner), name
