"""Private names of torch, looked up so that a torch without them costs a feature and never ends `import tunecompile`.

Modules of this package call `lookup` once, when they are imported. `report` and `tunecompile doctor` list the names
that are gone, each with the feature that is off (tunecompile/_torch/private_names.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tunecompile._torch.private_names import COMPILING_OFF, PRIVATE_NAMES, PrivateName

log = logging.getLogger("tunecompile")
NAMES = {row.name: row for row in PRIVATE_NAMES}  #: the table by dotted name


class NotRaised(Exception):
    """In the place of an error that this version of torch does not have."""


def lookup(name: str, default: Any = None) -> Any:
    """The object that a name of the table refers to.

    Args:
        name: dotted; a row of `PRIVATE_NAMES`.
        default: what to return where torch does not have it.

    Returns:
        The object, or `default`.

    Raises:
        KeyError: the table has no such row.
    """
    try:
        return _resolve(NAMES[name].name)
    except (ImportError, AttributeError):
        return default


def need(name: str) -> Any:
    """The object that a name of the table refers to, for code that cannot go on without it.

    Raises:
        ImportError: torch does not have it. The message says which version it was checked on.
        KeyError: the table has no such row.
    """
    try:
        return _resolve(NAMES[name].name)
    except (ImportError, AttributeError) as error:
        raise ImportError(str(NAMES[name])) from error


def exists(name: str) -> bool:
    """Whether torch has a name of the table."""
    return is_there(NAMES[name])


def exist(*names: str, under: str = "") -> bool:
    """Whether torch has all of these. under: a prefix of all of them."""
    return all(exists(f"{under}.{name}" if under else name) for name in names)


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Inside, functions of a module or class of torch's are others, for the whole process.

    Call it inside a compilation, where Dynamo's lock keeps other threads out.
    """
    before = {name: inspect.getattr_static(owner, name) for name in values}  # a static method as such
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def patched(config: Any, **settings: Any) -> contextlib.AbstractContextManager:
    """Inside, a configuration module of torch has these settings, as far as it knows them."""
    known = {name: value for name, value in settings.items() if hasattr(config, name)}
    return config.patch(**known) if known else contextlib.nullcontext()


def is_there(row: PrivateName) -> bool:
    """Whether its package, which is imported for that, has the name. What was there once is not looked for again."""
    if row.name not in _found:
        try:
            _resolve(row.name)
        except (ImportError, AttributeError):
            return False
        _found.add(row.name)
    return True


def missing(load: bool = False) -> tuple[PrivateName, ...]:
    """Rows of the table that the installed torch does not have.

    Args:
        load: whether to import modules of torch for that. Otherwise names of modules that are not imported are left
        out.
    """
    return lost(PRIVATE_NAMES, load)


def lost(rows: Iterable[PrivateName], load: bool) -> tuple[PrivateName, ...]:
    """Those of some rows whose package is installed and does not have them; see `missing`."""
    unknown = (row for row in rows if row.name not in _found)  # versions are compared slowly, and reports ask often
    return tuple(row for row in unknown if row.used and _can_check(row.name, load) and not is_there(row))


def notes(rows: Iterable[PrivateName] = PRIVATE_NAMES) -> list[str]:
    """A sentence for each lost name that costs a feature, of modules that are imported."""
    return [str(row) for row in lost(rows, load=False) if not row.required]


def why_off() -> str:
    """Why nothing can be compiled: the required names that torch does not have, of modules that are imported.

    Empty where it has all of them.
    """
    found = [row for row in missing() if row.required]
    if not found:
        return ""
    return (
        f"{COMPILING_OFF}: torch {torch.__version__} has no {', '.join(row.name for row in found)} "
        f"(last checked on {found[0].last_checked[-1]})"
    )


@functools.cache
def warn(line: str) -> None:
    """Log a warning; once, however often it comes up."""
    log.warning("tunecompile: %s", line)


_found: set[str] = set()


def _can_check(name: str, load: bool) -> bool:
    """Whether a name can be looked for: its modules are imported, or may be."""
    if name.startswith("torch.distributed.") and not torch.distributed.is_available():
        return False
    parts = name.split(".")
    modules = (".".join(parts[:count]) for count in range(1, len(parts)))
    first = next((module for module in modules if module not in sys.modules), None)
    return load or first is None or not _is_module(first)


@functools.cache
def _is_module(name: str) -> bool:
    """Whether there is such a module to be imported. What it lies in is imported already, or is no package."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _resolve(name: str) -> Any:
    """The object; None of an attribute that only instances have, or of a name in a function's code.

    Raises:
        ImportError: a module is not there.
        AttributeError: an attribute is not there.
    """
    try:
        return pkgutil.resolve_name(name)
    except AttributeError:
        owner, _, attribute = name.rpartition(".")
        if not _mentions(pkgutil.resolve_name(owner), attribute):
            raise
        return None


def _mentions(owner: Any, name: str) -> bool:
    """Whether instances of a class have this attribute, or the code of a function uses this name."""
    if not isinstance(owner, type):
        return _is_in_code(owner, name, arguments=True)
    return any(
        name in vars(base).get("__annotations__", ()) or any(_is_in_code(part, name) for part in vars(base).values())
        for base in owner.__mro__
        if base is not object
    )


def _is_in_code(part: Any, name: str, arguments: bool = False) -> bool:
    """Whether a function's code, or that of a property's or a method's function, uses a name.

    arguments: whether one of its arguments or variables may have it.
    """
    parts = (part.fget, part.fset) if isinstance(part, property) else (getattr(part, "__func__", part),)
    codes = [getattr(inspect.unwrap(each), "__code__", None) for each in parts if callable(each)]
    return any(
        name in (*code.co_names, *code.co_consts, *(code.co_varnames if arguments else ()))
        for code in codes
        if code is not None
    )
