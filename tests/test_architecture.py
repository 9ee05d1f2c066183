"""The house keeps its shape: imports go down, in no circle; private names in one place; folders and classes small."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: low to high; a package imports only from lines above its own
LEVELS = (
    "errors notes _torch",
    "ir templates",
    "ops planner",
    "compiler integrations",
    "passes runtime",
    "verification report estimate",
    "api",
    "trainers",
    "__init__",
    "cli",
    "__main__",
)
#: the same inside `runtime`, by its folders and files: what is looked at, then recordings, memory, the step, padding, layers
RUNTIME = (
    "__init__ compile_limits accumulation telemetry_files watch",
    "cuda_graphs",
    "memory",
    "step telemetry",
    "unpad",
    "layers",
    "loss_head",
    "model_state",
    "rollouts",
    "parts",
    "attach",
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names.split()}
#: what only `_torch` may touch. `_scaled_mm` and the like are operators, and `torch.utils._pytree` is what torch's own documents use
PRIVATE = re.compile(
    r"torch\._(?!scaled_mm|grouped_mm|foreach|ops|_version)|torch\.(?!utils\._pytree)\w+\._(?!_)\w"
    r"|\b_compiled_call_impl\b|\._call_impl\b|sys\._getframe"
)
FACTORIES = r"torch\.(arange|empty(_strided)?|eye|full|linspace|ones|rand(n|int|perm)?|scalar_tensor|tensor|zeros)"
LARGEST = 16  #: entries of a folder
MOST_METHODS = 16  #: of a class of `runtime`
WIDE = {"tunecompile/cli/compare"}  #: one command, whose files are its parts


def sources(root: Path = ROOT) -> dict[str, str]:
    """Source by its path inside the package. `passes` and `templates` stand beside it, and may be linked into it."""
    found = {}
    for folder, prefix in (("tunecompile", ""), ("passes", "passes/"), ("templates", "templates/")):
        for file in (root / folder).rglob("*.py"):
            path = file.relative_to(root / folder)
            if prefix or path.parts[0] not in ("passes", "templates"):
                found[prefix + path.as_posix()] = file.read_text(encoding="utf-8")
    return found


def module_of(path: str) -> str:
    return f"tunecompile/{path}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def top(path: str) -> str:
    """The package that a file is in."""
    return path.partition("/")[0].removesuffix(".py")


@functools.cache
def imports_in(source: str) -> list[ast.Import | ast.ImportFrom]:
    """`ast.walk`, so that late imports and those under TYPE_CHECKING count, too."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]


def edges(files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(file, file it imports)."""
    paths = {module_of(path): path for path in files}
    for path, source in files.items():
        package = module_of(path) if path.endswith("__init__.py") else module_of(path).rpartition(".")[0]
        for node in imports_in(source):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            else:
                above = package.rsplit(".", node.level - 1)[0] if node.level else ""
                module = ".".join(filter(None, (above, node.module)))
                named = [full if (full := f"{module}.{alias.name}") in paths else module for alias in node.names]
            yield from ((path, paths[name]) for name in named if paths.get(name, path) != path)


def upward(files: Mapping[str, str]) -> list[str]:
    """Imports that do not go down."""
    return sorted({f"{a} -> {b}" for a, b in edges(files) if top(a) != top(b) and LEVEL[top(b)] >= LEVEL[top(a)]})


def upward_in_runtime(files: Mapping[str, str]) -> list[str]:
    """Imports inside `runtime` that do not go down."""
    level = {name: at for at, names in enumerate(RUNTIME) for name in names.split()}
    inside = {path: path.split("/")[1].removesuffix(".py") for path in files if path.startswith("runtime/")}
    found = ((a, b) for a, b in edges(files) if a in inside and b in inside and inside[a] != inside[b])
    return sorted({f"{a} -> {b}" for a, b in found if level[inside[b]] >= level[inside[a]]})


def circles(files: Mapping[str, str]) -> list[str]:
    """Files that can be reached from themselves: what is left where files that import nothing are taken away again and again."""
    left: dict[str, set[str]] = {path: set() for path in files}
    for importer, imported in edges(files):
        left[importer].add(imported)
    while leaves := {path for path, imported in left.items() if not imported & left.keys()}:
        left = {path: imported for path, imported in left.items() if path not in leaves}
    return sorted(path for path in left if any(path in left[other] for other in left))


def private(files: Mapping[str, str]) -> list[str]:
    """Code outside `_torch` that touches torch's private names. Comments and strings may speak of them."""
    return [
        f"{path}:{number}"
        for path, source in files.items()
        if top(path) != "_torch"
        for number in private_lines(source)
    ]


@functools.cache
def private_lines(source: str) -> list[int]:
    lines: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.COMMENT, tokenize.STRING):
            space = " " * (token.type == tokenize.NAME and keyword(token.string))
            lines[token.start[0]] = lines.get(token.start[0], "") + token.string + space
    return [number for number, line in lines.items() if PRIVATE.search(line)]


def elsewhere(files: Mapping[str, str]) -> list[str]:
    """Tensors that are made without a device: under `torch.set_default_device("cuda")` they would be on the GPU, where
    nothing can be pinned, and no generator of the CPU draws numbers."""
    return [
        f"{path}:{call.lineno}"
        for path, source in files.items()
        if top(path) != "cli"
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and re.fullmatch(FACTORIES, ast.unparse(call.func))
        and not {"device", "out", None} & {each.arg for each in call.keywords}
    ]


def keyword(name: str) -> bool:
    return name in ("import", "from", "as", "in", "not", "and", "or", "is", "return", "if", "else", "lambda")


def crowded(files: Mapping[str, str]) -> dict[str, int]:
    folders = Counter("/".join(("tunecompile", *path.split("/")[:-1])) for path in files)
    return {folder: count for folder, count in folders.items() if count > LARGEST and folder not in WIDE}


def many_sided(files: Mapping[str, str]) -> list[str]:
    return [
        f"{path}: {node.name} has {count} methods"
        for path, source in files.items()
        if path.startswith("runtime/")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        and (count := sum(isinstance(item, ast.FunctionDef) for item in node.body)) > MOST_METHODS
    ]


def test_imports_go_down():
    assert upward(sources()) == []


def test_imports_inside_runtime_go_down():
    assert upward_in_runtime(sources()) == []


def test_no_circles():
    assert circles(sources()) == []


def test_private_torch_is_in_one_place():
    assert private(sources()) == []


def test_tensors_are_made_somewhere():
    assert elsewhere(sources()) == []


def test_folders_are_small():
    assert crowded(sources()) == {}
    rooms = {path.name for path in (ROOT / "tunecompile").iterdir() if path.is_dir()}
    assert len(rooms - {"__pycache__", "passes", "templates"}) <= LARGEST, rooms


def test_classes_of_the_runtime_do_one_thing():
    assert many_sided(sources()) == []


def test_every_package_has_a_level():
    assert {top(path) for path in sources()} == set(LEVEL)


@pytest.mark.parametrize(
    "net, path, code",
    [
        (upward, "planner/planted.py", "from tunecompile.runtime.layers.region import Region\n"),
        (upward, "ir/planted.py", "def late():\n    from tunecompile import ops\n"),
        (upward, "report/planted.py", "if TYPE_CHECKING:\n    import tunecompile.verification.verify\n"),
        (upward, "templates/planted.py", "from ..ops import lora\n"),
        (circles, "_torch/inductor.py", "from tunecompile._torch.known_bugs import Fault\n"),
        (private, "runtime/planted.py", "import torch\nprint(torch._C._current_graph_task_id())\n"),
        (private, "ops/planted.py", "from torch._dynamo.utils import counters\n"),
        (private, "report/planted.py", "slot = module._compiled_call_impl\n"),
        (elsewhere, "planner/planted.py", "pinned = torch.empty(8, pin_memory=True)\n"),
        (crowded, None, ""),
        (many_sided, "runtime/planted.py", "class Wide:\n" + "    def at(self): ...\n" * 17),
    ],
)
def test_violations_are_seen(net, path, code):
    planted = sources()
    if net is circles:
        planted["_torch/known_bugs.py"] += "from tunecompile._torch.inductor import Wrap\n"
    if path is None:
        planted |= {f"planner/planted{number}.py": "" for number in range(LARGEST)}
    else:
        planted[path] = planted.get(path, "") + code
    assert net(planted), "not noticed"
