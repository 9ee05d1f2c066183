"""The mutants of a source file: comparisons, limits, negations, operators, arguments, statements and results."""

from __future__ import annotations

import ast
import copy
import functools
import gc
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = (
    *("tunecompile/ir", "tunecompile/compiler", "tunecompile/planner", "passes"),
    *("tunecompile/runtime/loss_head", "tunecompile/runtime/unpad", "tunecompile/runtime/memory"),
)
_COMPARISONS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
#: last arguments whose absence shows in nothing that is computed, or in what never happens
_IDLE = ("strict", "encoding", "stacklevel", "indent", "repr", "buffering")
#: functions whose arguments may be swapped
_EITHER = (
    *("max", "min", "torch.promote_types"),
    *("tree_unflatten", "pytree.tree_unflatten", "torch.utils._pytree.tree_unflatten"),
)
_QUIET = ("log", "note", "warnings", "cast")  #: calls of these names, or of their methods, are words, or nothing


@dataclass(frozen=True)
class Mutant:
    """One change of a file: what stands at a node, and what will."""

    file: str  #: from the root of the repository
    line: int
    number: int  #: among the file's mutants
    before: str
    after: str

    @property
    def module(self) -> str:
        """The name by which the file is imported."""
        name = self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return name if name.startswith("tunecompile.") else f"tunecompile.{name}"


def all_mutants(folders: tuple[str, ...] = FOLDERS) -> list[Mutant]:
    """The mutants of all files of some folders."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return [mutant for file in files for mutant in mutants_of(file.relative_to(ROOT).as_posix())]


def mutants_of(file: str) -> list[Mutant]:
    """The mutants of a file."""
    tree = _tree(file)
    return [
        Mutant(file, node.lineno, number, _short(node), _short(other))
        for number, (_, _, _, node, other) in enumerate(_changes(tree))
    ]


def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def mutated(mutant: Mutant) -> ast.Module:
    """The file's tree with the mutant in it."""
    tree = _tree(mutant.file)
    parent, field, index, _, other = list(_changes(tree))[mutant.number]
    if index is None:
        setattr(parent, field, other)
    else:
        getattr(parent, field)[index] = other
    return ast.fix_missing_locations(tree)


class Planter(importlib.abc.MetaPathFinder):
    """Imports one module with a mutant in it."""

    def __init__(self, mutant: Mutant):
        self.mutant = mutant

    def find_spec(self, fullname, path=None, target=None):
        """The module's spec, where it is the one."""
        if fullname != self.mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        spec.loader = _Loader(fullname, spec.origin, self.mutant)
        return spec

    def plant(self) -> None:
        """From now on. The module must not have been imported."""
        assert self.mutant.module not in sys.modules
        sys.meta_path.insert(0, self)


class Imported:
    """What was imported from here on: functions that ran meanwhile cannot be changed any more."""

    def __init__(self):
        self.ran: set[tuple[str, int]] = set()  #: file and first line of each

    def __enter__(self) -> Imported:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: types.FrameType, event: str, _: object) -> None:
        if event == "call":
            self.ran.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    def has_run(self, mutant: Mutant) -> bool:
        """Whether the function that a mutant is in was called."""
        path, place = getattr(sys.modules.get(mutant.module), "__file__", None), _outermost(mutant)
        return place is not None and (path, place[1]) in self.ran

    def plant(self, mutant: Mutant) -> bool:
        """Put a mutant into the functions of its module, or have the module imported with it.

        Returns:
            False where it changes what ran at import.
        """
        if mutant.module not in sys.modules:
            Planter(mutant).plant()
            return True
        path, place = sys.modules[mutant.module].__file__ or "", _outermost(mutant)
        code = next((code for code in _codes(mutated(mutant), path) if _place(code) == place), None)
        gc.unfreeze()  # what tests leave to stay
        functions = [each for each in gc.get_objects() if type(each) is types.FunctionType]
        changed = [each for each in functions if each.__code__.co_filename == path and _place(each.__code__) == place]
        if code is None or (path, code.co_firstlineno) in self.ran:
            return False
        if any(each.__code__.co_freevars != code.co_freevars for each in changed):
            return False
        for function in changed:
            function.__code__ = code
        return bool(changed)


def _outermost(mutant: Mutant) -> tuple[str, int] | None:
    """Name and first line of the function that a mutant is in, of the outer one where it is in several."""
    around = [
        node
        for node in ast.walk(_tree(mutant.file))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body[0].lineno <= mutant.line <= (node.end_lineno or 0)
    ]
    outer = min(around, key=lambda node: node.lineno, default=None)
    if outer is None:
        return None
    return outer.name, min([outer.lineno, *(decorator.lineno for decorator in outer.decorator_list)])


def _place(code: types.CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _codes(tree: ast.Module, path: str) -> Iterator[types.CodeType]:
    """The code of all functions and classes of a file."""
    ahead = [compile(tree, path, "exec", dont_inherit=True)]
    while ahead:
        inner = [each for each in ahead.pop().co_consts if isinstance(each, types.CodeType)]
        ahead += inner
        yield from inner


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, mutant: Mutant):
        super().__init__(name, path)
        self.mutant = mutant

    def get_code(self, fullname: str) -> types.CodeType:
        return compile(mutated(self.mutant), self.path, "exec", dont_inherit=True)


@functools.cache
def _bodies(file: str) -> tuple[tuple[int, int], ...]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(_tree(file)) if isinstance(node, functions)]
    return tuple((node.body[0].lineno, node.end_lineno or 0) for node in found)


def body_of(file: str, line: int) -> int | None:
    """The line at which the body of the function that a line is in begins; None for a line that runs at import."""
    return max((begin for begin, end in _bodies(file) if begin <= line <= end), default=None)


def _short(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:90]


def _changes(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, ast.AST]]:
    """(parent, field, index in it, node, what takes its place) of every mutant."""
    for parent, field, index, node in _places(tree):
        for other in _others(node):
            yield parent, field, index, node, ast.copy_location(other, node)


def _places(parent: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Nodes that may be changed. Words, types, decorators and imports stay."""
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases", "keywords_of_class"):
            continue
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or isinstance(node, (ast.Import, ast.ImportFrom)) or _is_quiet(node):
                continue
            if isinstance(node, ast.keyword) and node.arg in _IDLE:
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in _short(node.test):
                continue
            yield parent, field, index, node
            yield from _places(node)


def _is_quiet(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else node
    if isinstance(call, (ast.Constant, ast.JoinedStr)):
        return isinstance(node, (ast.Expr, ast.JoinedStr))
    named = call.func if isinstance(call, ast.Call) else None
    while isinstance(named, ast.Attribute):
        named = named.value
    return isinstance(named, ast.Name) and named.id in _QUIET


def _others(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the node's place."""
    if isinstance(node, ast.Compare):
        yield ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        for index in range(len(node.values) if len(node.values) > 2 else 0):
            yield ast.BoolOp(node.op, [value for i, value in enumerate(node.values) if i != index])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not _is_text(node):
        yield ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.Constant):
        yield from _constants(node.value)
    elif isinstance(node, ast.Call):
        if len(node.args) > 1 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
            if ast.dump(node.args[0]) != ast.dump(node.args[1]) and _short(node.func) not in ("isinstance", *_EITHER):
                yield ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
        if node.keywords and node.keywords[-1].arg not in (None, *_IDLE):
            yield ast.Call(node.func, node.args, node.keywords[:-1])
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        changed = copy.copy(node)
        changed.test = ast.UnaryOp(ast.Not(), node.test)
        yield changed
    elif isinstance(node, (ast.AugAssign, ast.Raise, ast.Delete)) or _is_effect(node):
        yield ast.Pass()
    elif isinstance(node, (ast.Break, ast.Continue)):
        yield ast.Continue() if isinstance(node, ast.Break) else ast.Break()
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield ast.Return(ast.Constant(None))


def _is_effect(node: ast.AST) -> bool:
    """Whether a statement is a call, or writes to an attribute or an item."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, (ast.Call, ast.Await))
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in (node.left, node.right))


def _constants(value: object) -> Iterator[ast.Constant]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield ast.Constant(value + 1)
    elif isinstance(value, float):
        yield ast.Constant(value * 2 if value else 1.0)
