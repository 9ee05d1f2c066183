"""The fork of transformers' towers: attention of all images at once, or of each image in a loop.

A tower has one row of patches, and bounds that say where each image begins. Where the config requests flash attention,
the attention function gets the bounds; elsewhere `lengths.tolist()` splits the row, and a loop calls the function for
each image: a graph break, a graph a number of images, a graph a size. The fork is read in the source of the module.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

TEST = "is_flash_attention_requested"
TOLD = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}  #: what only all images at once are told


@dataclass(frozen=True)
class Fork:
    """Where a module's code forks."""

    bounds: str  #: the parameter that has the bounds: int [images + 1]
    reads_weights: bool  #: whether the code goes on to read what the attention function returns beside its result


@functools.cache
def fork_of(forward: Callable) -> Fork | None:
    """The fork in a module's forward; None where there is none, or one whose ways may differ in more than the loop."""
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return None
    found = [node for node in ast.walk(function) if isinstance(node, ast.If) and _calls(node.test, TEST)]
    if len(found) != 1 or ast.unparse(found[0].test) != f"{TEST}(self.config)":
        return None
    return _read(found[0], list(inspect.signature(forward).parameters))


def _read(fork: ast.If, parameters: list[str]) -> Fork | None:
    *before, last = fork.body
    if not (
        isinstance(last, ast.Assign) and isinstance(last.value, ast.Call) and isinstance(last.targets[0], ast.Tuple)
    ):
        return None
    if [_calls(getattr(each, "value", None), "get_max_seqlen") for each in before] != [True]:
        return None
    call, result = last.value, [getattr(each, "id", "") for each in last.targets[0].elts]
    given = options(call)
    bounds = given.get("cu_seq_lens_q", "")
    if len(result) != 2 or bounds not in parameters or given.get("cu_seq_lens_k") != bounds:
        return None
    if (given.get("attention_mask"), given.get("is_causal")) != ("None", "False"):
        return None
    if not _is_loop(fork.orelse, call, bounds, result[0]):
        return None
    return Fork(bounds, result[1] != "_")


def _is_loop(way: list[ast.stmt], fork: ast.Call, bounds: str, result: str) -> bool:
    """Whether statements call the function of the other way, with its options, for each part between bounds."""
    lines = [ast.unparse(each) for each in way]
    row = ", ".join(ast.unparse(each) for each in fork.args[1:])
    name = getattr(fork.func, "id", "")
    calls = [node for each in way for node in ast.walk(each) if isinstance(node, ast.Call) and _calls(node, name)]
    if len(calls) != 1 or len(fork.args) != 4 or len(calls[0].args) != 4 or ast.unparse(fork.args[0]) != "self":
        return False
    begin = [
        f"lengths = {bounds}[1:] - {bounds}[:-1]",
        f"splits = [torch.split(tensor, lengths.tolist(), dim=2) for tensor in ({row})]",
    ]
    parts = ", ".join(ast.unparse(each) for each in calls[0].args[1:])
    rest = "\n".join(lines[2:]).replace(ast.unparse(calls[0]), "CALL")
    return (
        lines[:2] == begin
        and ast.unparse(calls[0].args[0]) == "self"
        and options(calls[0]) == {name: text for name, text in options(fork).items() if name not in TOLD}
        and any(re.fullmatch(form.format(parts=parts, result=result), rest) for form in _FORMS)
    )


#: what follows the split: parts are named in the order of the call's arguments, and joined along tokens
_FORMS = (
    r"(\w+) = \[CALL\[0\] for {parts} in zip\(\*splits\)\]\n{result} = torch\.cat\(\1, dim=1\)",
    r"{result} = torch\.cat\(\[CALL\[0\] for {parts} in zip\(\*splits\)\], dim=1\)",
    r"(\w+), (\w+) = \(?\[\], \[\]\)?\nfor {parts} in zip\(\*splits\):\n    (\w+), (\w+) = CALL\n    \1\.append\(\3\)\n"
    r"    \2\.append\(\4\)\n{result} = torch\.cat\(\1, dim=1\)",
)


def options(call: ast.Call) -> dict[str | None, str]:
    """A call's arguments by name."""
    return {each.arg: ast.unparse(each.value) for each in call.keywords}


def _calls(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
