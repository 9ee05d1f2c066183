"""make docs: the README and the docstrings of all that is public, as pages. By pdoc (https://pdoc.dev), which renders Markdown.

    python docs/build.py reports/docs

What the generator warns of (an annotation that cannot be read, say) is an error here.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from unittest.mock import MagicMock

if TYPE_CHECKING:
    import pdoc

    from tunecompile import Pass
    from tunecompile.ir.op import Op, Provider

CORE = ("op", "rewrite", "match", "canonical", "pipeline", "plugins", "check", "dump", "report", "verify", "errors")
FOLDERS = ("ops", "passes", "passes.recognize", "passes.plan", "passes.lower", "templates")  #: of which every file is public
LONG = 400  #: characters, from which on a constant's value is not shown


def public() -> dict[str, ModuleType]:
    """All modules that have a page, by name. Each says by `__all__` what of it is public."""
    names = ["tunecompile", *(f"tunecompile.{name}" for name in (*CORE, *FOLDERS))]
    for folder in FOLDERS:
        names += [found.name for found in pkgutil.iter_modules(importlib.import_module(f"tunecompile.{folder}").__path__, f"tunecompile.{folder}.")]
    triton = MagicMock(jit=lambda kernel: kernel)  # templates are read here, and not run
    fakes = {"triton": triton, "triton.language": triton.language} if importlib.util.find_spec("triton") is None else {}
    sys.modules.update(fakes)
    modules = {name: importlib.import_module(name) for name in dict.fromkeys(names)}
    for name in fakes:  # what torch imports later must not take it for the package
        del sys.modules[name]
    return modules


def unfold(module: ModuleType) -> None:
    """Ops are objects, for which pdoc has no page: in their places stand the functions that they were made of, with what the registry knows."""
    from tunecompile.ir.op import Op

    for name in module.__all__:
        if isinstance(op := vars(module).get(name), Op):
            setattr(module, name, op.reference)
            op.reference.__doc__ = op.__doc__ + "".join(["\n\n    The registry:\n", *(f"        - {line}\n" for line in of_op(op))])


def of_op(op: Op) -> list[str]:
    called = [f"`torch.ops.{op.overload}` in a graph", "called as it is: no provider takes its place" if op.opaque else f"cost: `{op.cost.name}`"]
    others = [f"{what}: `{other.reference.__module__}.{other.name}`" for what, other in (("backward", op.backward_op), ("in pieces", op.tiled)) if other]
    return [*called, *others, *map(of_provider, op.providers), *([] if op.opaque else ["provider `reference`: takes any arguments"])]


def of_provider(provider: Provider) -> str:
    precision = f", where `precision={provider.precision!r}`" if provider.precision else ""
    return f"provider `{provider.name}`{precision}: {provider.because}"


def of_pass(p: Pass) -> str:
    """Its contract, and what it tries."""
    told = {"requires": sorted(p.requires), "provides": sorted(p.provides), "conflicts with": sorted(p.conflicts),
            "tries, in order,": [rewrite.name for rewrite in p.rewrites]}
    lines = [f"- {what} {', '.join(f'`{name}`' for name in names)}" for what, names in told.items() if names]
    return "\n".join([f"The pass `{p.name}`, of stage `{p.stage}`.\n", *lines])


def comments(source: str, indent: str = "") -> dict[str, str]:
    """What `#:` says beside or above the constants of a module, or the fields of a class."""
    found, above = {}, []
    for line in source.splitlines():
        if comment := re.match(rf"{indent}#: (.*)", line):
            above.append(comment[1])
        elif names := re.match(rf"{indent}(\w+(?:, \w+)*)(?: = |: )(?:[^#]*#: (.*))?", line):
            found.update(dict.fromkeys(names[1].split(", "), names[2] or " ".join(above)))
            above = []
    return found


def describe(namespace: pdoc.doc.Namespace) -> None:
    """Constants and fields get their comments, which pdoc does not read, and passes their contracts."""
    from tunecompile import Pass

    beside = comments(namespace.source, "    " if namespace.kind == "class" else "")
    for member in namespace.own_members:
        if member.kind == "class":
            describe(member)
        elif member.kind == "variable":
            value = getattr(namespace.obj, member.name, None)
            member.docstring = of_pass(value) if isinstance(value, Pass) else beside.get(member.name) or member.docstring
            if isinstance(value, Pass) or len(member.default_value_str) > LONG:
                member.default_value_str = ""


def build(folder: Path) -> None:
    """Write the pages into `folder`."""
    import pdoc

    modules = public()
    for name, module in modules.items():
        unfold(module)
        describe(pdoc.doc.Module.from_name(name))
    front = modules["tunecompile"]
    front.__doc__ = f".. include:: ../README.md\n\n# The modules\n\n{front.__doc__}"
    pdoc.render.configure(docformat="google", template_directory=Path(__file__).parent, footer_text=f"tunecompile {front.__version__}")
    named = {f"{name}.{member}" for name, module in modules.items() for member in module.__all__}  # pdoc makes their pages with their package's
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc(*(name for name in modules if name not in named), output_directory=folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
