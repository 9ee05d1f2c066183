"""The generated parts of the docs: `<!-- generated: NAME -->` in a page becomes the lines of the function NAME."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

ROOT = Path(__file__).parent.parent
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.M)
GENERATED: dict[str, Callable[[], str]] = {}
VARIABLES = {  #: what the code does not say in one place
    "TUNECOMPILE": "`0` switches tunecompile off: `optimize` returns the model as it is, and so do all doors. `1` "
    "asks Lightning's and Fabric's trainers to optimize what they train, as `tunecompile run` does.",
    "TUNECOMPILE_DUMP": "A folder: every region's graph is written there, before the first pass of each stage "
    "and after each pass that changed it. Code is generated anew.",
    "TUNECOMPILE_PASSES": "Entry points of the group `tunecompile.passes` to use, separated by commas, "
    "or `none`. All installed ones if not set.",
    "TUNECOMPILE_CACHE": "The folder in which `tunecompile demo` keeps the model that it downloads. "
    "`~/.cache/tunecompile` if not set.",
    "TUNECOMPILE_NODES": "Operations of a graph from which on it is not compiled: 5000 if not set.",
    "TUNECOMPILE_SECONDS": "Seconds after which a compilation ends: its graph runs operation by operation, and so do "
    "further ones of its layers. 600 if not set.",
    "TUNECOMPILE_AS": "A card such as `rtx4090` or `t4`: the GPU that is there behaves as that smaller one, in what is "
    "chosen and in how much memory there is. For tests; see [hardware](hardware.md#as-a-smaller-card).",
    "TUNECOMPILE_RUN": "Set by `tunecompile run` for the processes that it starts. Not for users.",
    "TUNECOMPILE_TURNS": "Set by `tunecompile compare` for its own worker processes. Not for users.",
}
AUTHORS = (  #: modules that authors of passes import
    "ir.op",
    "ir.example",
    "ir.rewrite",
    "ir.match",
    "ir.canonicalize",
    "compiler.pass_manager",
    "compiler.plugins",
    "compiler.graph_dump",
    "verification.check_pass",
)
_folder: Any = None


@event_priority(100)  # before mkdocstrings reads its own
def on_config(config: Any) -> Any:
    """Put the package together as an installation has it, for mkdocstrings, which reads files and imports nothing."""
    global _folder
    sys.path.insert(0, str(ROOT))
    _folder = tempfile.TemporaryDirectory()
    package = Path(_folder.name) / "tunecompile"
    for folder, target in (
        ("tunecompile", package),
        ("passes", package / "passes"),
        ("templates", package / "templates"),
    ):
        shutil.copytree(
            ROOT / folder,
            target,
            ignore=lambda at, names: [n for n in names if n == "__pycache__" or (Path(at) / n).is_symlink()],
        )
    for file in package.rglob("*.py"):  # in formulas, [X | XA] [W | B] is no link
        file.write_text(file.read_text(encoding="utf-8").replace("] [", "] &#91;"), encoding="utf-8")
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_folder.name]
    config.watch += [str(ROOT / name) for name in ("tunecompile", "passes", "templates")]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the marks of a page."""
    return MARK.sub(lambda found: GENERATED[found[1]](), markdown)


def on_post_build(**_: Any) -> None:
    """Remove the package made for mkdocstrings."""
    _folder.cleanup()


def generated(function: Callable[[], Iterator[str]]) -> Callable[[], Iterator[str]]:
    """Register the lines of a page's part under the function's name."""
    GENERATED[function.__name__] = lambda: "\n".join(function()) + "\n"
    return function


def directive(path: str, heading: str = "", **options: Any) -> str:
    """A block of mkdocstrings."""
    chosen = {**({"heading": heading, "toc_label": heading} if heading else {}), **options}
    return "\n".join(
        [
            f"\n::: {path}",
            "    options:" if chosen else "",
            *(f"      {name}: {value!r}" for name, value in chosen.items()),
            "",
        ]
    )


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n"
        + "\n".join(
            "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
            for line in lines
        )
        + "\n"
    )


def source_of(value: Any) -> str:
    """The dotted path of a public object's definition."""
    return f"{value.__module__}.{value.__qualname__}"


def modules(package: str) -> list[str]:
    """A package and its public files, by name."""
    path = importlib.import_module(package).__path__
    return [
        package,
        *(found.name for found in pkgutil.walk_packages(path, f"{package}.") if "._" not in found.name),
    ]


@generated
def public_api() -> Iterator[str]:
    """Every public name."""
    import tunecompile

    elsewhere = []
    for name in sorted(tunecompile.__all__, key=lambda name: (name[0].isupper(), name)):
        value = getattr(tunecompile, name)
        if value.__module__.removeprefix("tunecompile.") in AUTHORS:
            elsewhere.append(f"- [`tunecompile.{name}`][{source_of(value)}]")
        else:
            yield directive(source_of(value), heading=f"tunecompile.{name}")
    yield "\n## For authors of passes\n\n" + "\n".join(elsewhere)


@generated
def report_objects() -> Iterator[str]:
    """Classes that public functions return and that are no public names themselves."""
    from tunecompile.report import report

    for name in sorted(report.__all__, reverse=True):
        yield directive(source_of(getattr(report, name)), show_if_no_docstring=True)


@generated
def pass_authors() -> Iterator[str]:
    """The modules that authors of passes import, whole."""
    for name in AUTHORS:
        yield directive(f"tunecompile.{name}", filters="public")


@generated
def passes() -> Iterator[str]:
    """The pipeline: contract of each pass, and the rewrites that it tries."""
    from tunecompile.passes import PIPELINE

    rows = []
    for number, each in enumerate(PIPELINE, 1):
        contract = [
            f"{word} {', '.join(f'`{name}`' for name in sorted(names))}"
            for word, names in (
                ("requires", each.requires),
                ("provides", each.provides),
                ("conflicts with", each.conflicts),
            )
            if names
        ]
        rows.append(
            [
                number,
                f"`{each.name}`",
                each.stage,
                "; ".join(contract),
                ", ".join(f"`{rewrite.name}`" for rewrite in each.rewrites),
            ]
        )
    yield table(["", "pass", "stage", "contract", "rewrites, in the order in which they are tried"], rows)


@generated
def ops_table() -> Iterator[str]:
    """Every op of the registry, with its providers."""
    rows = []
    for op in own_ops():
        notes = [
            f"backward: `{op.backward_op.name}`" if op.backward_op else "",
            f"tiled: `{op.tiled.name}`" if op.tiled else "",
        ]
        providers = [
            f"`{p.name}`" + (f" ({p.precision})" if p.precision else "") + (f": {p.because}" if p.because else "")
            for p in op.providers
        ]
        cost = "called as it is" if op.opaque and not op.providers else op.cost.name
        rows.append(
            [
                f"[`{op.name}`][{source_of(op.reference)}]",
                cost,
                "; ".join(filter(None, notes)),
                "<br>".join([*providers, "`reference`, called as it is" if op.opaque else "`reference`"]),
            ]
        )
    yield table(["op", "cost", "related ops", "providers, in the order in which they are asked"], rows)


@generated
def ops() -> Iterator[str]:
    """The meaning of every op, file by file."""
    import tunecompile.ops  # noqa: F401 - fills the registry

    for name in modules("tunecompile.ops")[1:]:
        yield directive(name, filters="public")


def own_ops() -> list[Any]:
    """Ops that come with tunecompile."""
    from tunecompile.ir.op import OPS

    for name in modules("tunecompile.ops"):
        importlib.import_module(name)
    return sorted(
        (op for op in OPS.values() if op.reference.__module__.startswith("tunecompile.ops.")),
        key=lambda op: (op.reference.__module__, op.name),
    )


@generated
def templates() -> Iterator[str]:
    """Launch functions and kernels. Read as files: Triton need not be installed."""
    for file in sorted((ROOT / "templates").glob("[a-z]*.py")):
        yield directive(f"tunecompile.templates.{file.stem}", filters="public")
    for name in ("_launch", "_tiles"):
        yield directive(f"tunecompile.templates.{name}")


@generated
def errors() -> Iterator[str]:
    """Every error: its bases, where it is raised, and its message."""
    from tunecompile import errors

    for name in sorted(vars(errors)):
        value = getattr(errors, name)
        if inspect.isclass(value):
            bases = ", ".join(f"`{base.__name__}`" for base in value.__bases__)
            said = inspect.getdoc(value).partition("\n\nArgs:")[0]
            message = value.template.replace("<", "&lt;")
            yield f"\n## {name} {{ #{name} }}\n\n{said}\n\nBase: {bases}. Message:\n\n> {message}\n"


def commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """(name, command) of a group's commands, and of groups inside it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{above}{name} ")
        else:
            yield above + name, command


@generated
def cli() -> Iterator[str]:
    """Every command with its arguments and options, from the command tree."""
    import typer

    from tunecompile.cli import app

    for name, command in commands(typer.main.get_command(app)):
        yield f"\n## tunecompile {name} {{ #{name.replace(' ', '-')} }}\n\n{command.help}\n"
        rows = []
        for parameter in command.params:
            spelled = [*parameter.opts, *parameter.secondary_opts]
            argument = parameter.param_type_name == "argument"
            default = (
                parameter.default
                if isinstance(parameter.default, (str, int, float, Path)) and not isinstance(parameter.default, bool)
                else ""
            )
            rows.append(
                [
                    f"`{parameter.name.upper()}`" if argument else ", ".join(f"`{word}`" for word in spelled),
                    f"`{default}`" if default != "" else "required" if parameter.required else "",
                    getattr(parameter, "help", "") or "",
                ]
            )
        yield table(["argument or option", "default", ""], rows)


@generated
def environment_variables() -> Iterator[str]:
    """Every variable that the sources name. One that nobody described is an error."""
    named = set()
    for file in (file for folder in ("tunecompile", "passes", "templates") for file in (ROOT / folder).rglob("*.py")):
        named |= set(re.findall(r"\bTUNECOMPILE(?:_[A-Z]+)?\b", file.read_text(encoding="utf-8")))
    if named != set(VARIABLES):
        raise LookupError(f"docs/hooks.py and the sources name other environment variables: {named ^ set(VARIABLES)}")
    yield table(["variable", "meaning"], [[f"`{name}`", VARIABLES[name]] for name in sorted(named)])


@generated
def levels() -> Iterator[str]:
    """The level diagram, from the tuple that the architecture test checks."""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8"))
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["LEVELS"]
    )
    rows = list(enumerate(ast.literal_eval(value)))
    width = max(len("   ".join(names.split())) for _, names in rows) + 4
    yield "```text"
    for level, names in reversed(rows):
        yield f"{level}  ┌{'─' * width}┐\n   │{'   '.join(names.split()):^{width}}│\n   └{'─' * width}┘"
    yield "```\n"
    rows = [[name, level, _summary(name)] for level, names in rows for name in names.split() if name != "__init__"]
    yield table(["package or file", "level", "content"], [[f"`{name}`", level, text] for name, level, text in rows])


def _summary(name: str) -> str:
    """The first paragraph of a package's docstring."""
    found = next(
        path
        for folder in ("tunecompile", ".")
        for path in (ROOT / folder / f"{name}.py", ROOT / folder / name / "__init__.py")
        if path.exists()
    )
    return (ast.get_docstring(ast.parse(found.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]


def _private(rows: Any) -> str:
    """One table of private names."""
    return table(
        ["name", "used since", "last checked", "where it is gone"],
        [
            [
                f"`{row.name}`",
                row.since + (f", until {row.until}" if row.until else ""),
                ", ".join(row.last_checked),
                row.fallback,
            ]
            for row in sorted(rows, key=lambda row: row.name)
        ],
    )


@generated
def private_torch() -> Iterator[str]:
    """Private names of torch."""
    from tunecompile._torch.private_names import PRIVATE_NAMES

    yield _private(PRIVATE_NAMES)


@generated
def private_packages() -> Iterator[str]:
    """Private names of other packages."""
    from tunecompile.integrations.private_names import PRIVATE_NAMES

    for package in sorted({row.package for row in PRIVATE_NAMES}):
        yield f"\n### {package}\n"
        yield _private(row for row in PRIVATE_NAMES if row.package == package)


@generated
def notes() -> Iterator[str]:
    """All notes of the report by code, with advice."""
    from tunecompile.notes import NOTES, REASONS

    for heading, kinds in (("Notes", NOTES), ("Reasons inside notes", REASONS)):
        yield f"\n### {heading}\n"
        rows = [
            [f"`{code}`", kind.words.replace("{", "*").replace("}", "*"), kind.mend]
            for code, kind in sorted(kinds.items())
        ]
        yield table(["code", "words", "what to do"], rows)


@generated
def known_bugs() -> Iterator[str]:
    """The table of other packages' bugs."""
    from tunecompile._torch.known_bugs import FAULTS

    rows = []
    for fault in FAULTS.values():
        since, fixed = (
            ".".join(map(str, version)) if version else ""
            for version in (fault.since if fault.since != (0,) else None, fault.fixed)
        )
        versions = (
            " ".join(filter(None, (f"from {since}" if since else "", f"before {fixed}" if fixed else ""))) or "all"
        )
        owner, _, number = fault.issue.partition("#")
        rows.append([fault.package, versions, fault.what, fault.instead, f"{owner}#{number}" if number else ""])
    yield table(["package", "versions", "bug", "what tunecompile does", "issue"], rows)
