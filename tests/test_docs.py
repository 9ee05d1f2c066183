"""What a kernel author reads is there and true to the code: of every public name its parameters, results, errors, shapes, dtypes, units and sources."""

import ast
import builtins
import functools
import importlib.util
import inspect
import re
import subprocess
import sys
from dataclasses import dataclass, is_dataclass
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Iterator

import pytest

from tunecompile import Pass, errors
from tunecompile.ir.op import OPS, Op

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "docs" / "build.py"
DTYPE = re.compile(r"\b(dtype|e4m3|fp16|bf16|fp32|fp64|u?int\d+)\b")
SHAPE = re.compile(r"\[(?!d)[^\]]+\]|as \w+ in shape|in the shapes? of|in shape and dtype of")
SOURCE = re.compile(r"arXiv:\d{4}\.\d{5}|https://")
UNIT = re.compile(r"\b(bytes|GiB|tokens|rows|columns|elements|weights|blocks|classes|heads|pieces|warps|threads|stages|layers|milliseconds|operations|calls"
                  r"|graphs|ops|anchors|outputs|factors?|share|units|label|multiple|number|numbers|times|radians|scores)\b", re.I)  #: counted, or measured in


@dataclass(frozen=True)
class Public:
    """A public name: a function, an op's reference, a method, a class or a constant."""

    module: ModuleType
    name: str
    value: Any
    doc: str
    op: Op | None = None

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return {name: p for name, p in inspect.signature(self.value).parameters.items() if name != "self"}

    def said(self, name: str) -> str:
        """Of an argument, what its section says."""
        found = re.search(rf"^ +{name}: ((?:.|\n)*?)(?=\n\s*\n|\n +\w+: |\Z)", self.doc, re.M)
        return found[1] if found else ""


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build", BUILD)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def modules(build) -> dict[str, ModuleType]:
    pytest.importorskip("triton")  # without it, `public` would put another in its place
    return build.public()


@pytest.fixture(scope="module")
def names(build, modules) -> list[Public]:
    found = []
    for module in modules.values():
        comments = build.comments(inspect.getsource(module))
        for name in module.__all__:
            value = vars(module)[name]
            if isinstance(value, Op):
                found.append(Public(module, name, value.reference, value.reference.__doc__ or "", value))
            elif inspect.isroutine(value) or inspect.isclass(value):
                found.append(Public(module, name, value, value.__doc__ or ""))
            else:
                found.append(Public(module, name, value, comments.get(name, "")))
            if inspect.isclass(value):
                found += methods(module, value)
    return found


def methods(module: ModuleType, cls: type) -> Iterator[Public]:
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else member.__func__ if isinstance(member, staticmethod) else member
        if not name.startswith("_") and inspect.isfunction(function):
            yield Public(module, f"{cls.__name__}.{name}", function, function.__doc__ or "")


def functions(names: list[Public]) -> list[Public]:
    return [public for public in names if inspect.isfunction(public.value)]


def in_folder(names: list[Public], *folders: str) -> list[Public]:
    return [public for public in functions(names) if public.module.__name__.startswith(tuple(f"tunecompile.{folder}." for folder in folders))
            and "._" not in public.module.__name__]


@functools.cache
def definitions(file: str) -> dict[Any, ast.AST]:
    """Functions by the line in which they begin, decorators included, and classes by name. (`inspect.getsource` reads the file anew for each.)"""
    found: dict[Any, ast.AST] = {}
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            found[min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])] = node
        elif isinstance(node, ast.ClassDef):
            found[node.name] = node
    return found


def parsed(function: Callable) -> ast.FunctionDef:
    return definitions(function.__code__.co_filename)[function.__code__.co_firstlineno]


def source(cls: type) -> str:
    file = sys.modules[cls.__module__].__file__
    node = definitions(file)[cls.__name__]
    return "\n".join(Path(file).read_text(encoding="utf-8").splitlines()[node.lineno - 1:node.end_lineno])


def test_all_that_is_public_is_described(modules, names):
    assert [name for name, module in modules.items() if not module.__doc__ or len(set(module.__all__)) < len(module.__all__)] == []
    missing = [str(public) for public in names if not public.doc.strip() and not isinstance(public.value, Pass)]  # whose contract stands for it
    assert not missing, "\n".join(missing)


def test_nothing_is_forgotten(modules, names):
    """Every op, and every launch function of a template."""
    listed = {public.op.name for public in names if public.op is not None}
    assert {op.name for op in OPS.values() if op.reference.__module__.startswith("tunecompile.ops.")} - listed == set()
    assert [f"{name}.{member}" for name, module in modules.items() if name.startswith("tunecompile.templates.")
            for member, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == name and member[0] != "_"
            and member not in module.__all__] == []


def test_parameters_are_named(names):
    """Those of a backward that are its forward's are described there."""
    known = {op.backward_op.name: set(op.parameters) for op in OPS.values() if op.backward_op is not None}
    missing = [f"{public}: {name}" for public in functions(names) for name in public.parameters
               if not re.search(rf"\b{name}\b", public.doc) and not (public.op is not None and name in known.get(public.op.name, ()))]
    assert not missing, "\n".join(missing)


def test_fields_are_described(build, names):
    missing = []
    for public in names:
        if inspect.isclass(public.value) and (is_dataclass(public.value) or hasattr(public.value, "_fields")):
            comments = build.comments(source(public.value), "    ")
            kinds = inspect.get_annotations(public.value)
            for name, kind in kinds.items():
                said = comments.get(name, "")
                number = re.fullmatch(r"(int|float)( \| None)?", kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind)))
                if not said or (number and not UNIT.search(f"{name} {said}")):
                    missing.append(f"{public}.{name}: {said}")
    assert not missing, "\n".join(missing)


def test_results_are_described(names):
    """Of functions; a method is short enough to begin with it."""
    missing = [str(public) for public in functions(names) if "." not in public.name and gives(public.value) and "Returns:\n" not in public.doc]
    assert not missing, "\n".join(missing)


def gives(function: Callable) -> bool:
    """Whether it returns something."""
    tree = parsed(function)
    inner = {node for child in ast.walk(tree) if isinstance(child, (ast.FunctionDef, ast.Lambda)) and child is not tree for node in ast.walk(child)}
    return any(isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) and node.value is not None and node not in inner for node in ast.walk(tree))


def test_errors_are_named(names):
    """Those that a function or its private helpers raise, and no others that do not exist."""
    missing = [f"{public}: {error}" for public in functions(names) for error in sorted(raised(public.value)) if error not in public.doc]
    assert not missing, "\n".join(missing)
    told = [(public, error) for public in functions(names) if "Raises:\n" in public.doc
            for line in re.findall(r"^ +((?:[A-Z]\w+)(?:, [A-Z]\w+)*): ", public.doc.partition("Raises:\n")[2], re.M) for error in line.split(", ")]
    assert [f"{public}: {error}" for public, error in told if not hasattr(errors, error) and not hasattr(builtins, error)] == []


def raised(function: Callable) -> set[str]:
    """By itself, by functions within it, and by private helpers that it calls."""
    found, seen, pending = set(), set(), [function]
    while pending:
        each = pending.pop()
        own, helpers = calls(each)
        seen.add(each)
        found |= own
        pending += [helper for name in helpers if inspect.isfunction(helper := each.__globals__.get(name)) and helper not in seen]
    return found


@functools.cache
def calls(function: Callable) -> tuple[set[str], set[str]]:
    """Names of errors that are raised, and of private functions that are called."""
    nodes = list(ast.walk(parsed(function)))
    errors = {node.exc.func.id for node in nodes if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)}
    return {name for name in errors if name[0] != "_"}, {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                                                        and node.func.id.startswith("_")}


def test_tensors_have_shapes_and_dtypes(names):
    lacking = [str(public) for public in in_folder(names, "ops", "templates")
               if any(is_tensor(public, p) for p in public.parameters.values()) and not (SHAPE.search(public.doc) and DTYPE.search(public.doc))]
    assert not lacking, "\n".join(lacking)


def is_tensor(public: Public, parameter: inspect.Parameter) -> bool:
    return "Tensor" in str(parameter.annotation) or (parameter.annotation is parameter.empty and parameter.default is parameter.empty)


def test_numbers_have_units(names):
    """What they count, or what they are measured in."""
    lacking = [f"{public}: {name}: {public.said(name)}" for public in functions(names) for name, p in public.parameters.items()
               if (re.search(r"\b(int|float)\b", str(p.annotation)) or type(p.default) in (int, float)) and "Callable" not in str(p.annotation)
               and public.said(name) and not UNIT.search(f"{name} {public.said(name)}")]
    assert not lacking, "\n".join(lacking)


def test_algorithms_have_sources(names):
    """A paper, or whose code it is, in the docstring or the file's."""
    algorithms = [public for public in names if public.op is not None] + in_folder(names, "templates")
    lacking = [str(public) for public in algorithms if not SOURCE.search(public.doc + public.module.__doc__)]
    assert not lacking, "\n".join(lacking)


class Page(HTMLParser):
    """Anchors, links and pictures."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.links, self.pictures = set(), [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list) -> None:
        given = dict(attrs)
        self.anchors |= {given["id"]} if "id" in given else set()
        self.links += [given["href"]] if tag == "a" and given.get("href") else []
        self.pictures += [given["src"]] if tag == "img" else []


@pytest.mark.slow
@pytest.mark.parametrize("triton", [True, False], ids=["triton", "no triton"])
def test_pages(tmp_path, names, triton):
    """All public names have an anchor, links lead somewhere, pictures are there, and nothing is warned of; on a machine without Triton as well."""
    pytest.importorskip("pdoc")
    hide = "" if triton else "sys.modules['triton'] = None"
    script = f"import runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\n{hide}\nrunpy.run_path({str(BUILD)!r})['build'](__import__('pathlib').Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr[-3000:]
    pages = {path: Page(path) for path in tmp_path.rglob("*.html")}
    anchors = {path: page.anchors for path, page in pages.items()}
    assert [str(public) for public in names if public.name not in anchors.get(tmp_path / f"{public.module.__name__.replace('.', '/')}.html", ())] == []
    broken = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if not re.match(r"\w+:", link):
                found = anchors.get((path.parent / target).resolve() if target else path)
                broken += [f"{path.name}: {link}"] if found is None or (anchor and anchor not in found) else []
    assert not broken, "\n".join(broken)
    front = pages[tmp_path / "tunecompile.html"].pictures
    assert sum(picture.startswith("data:image/") for picture in front) >= 3 and not any(picture.startswith("docs/") for picture in front)
