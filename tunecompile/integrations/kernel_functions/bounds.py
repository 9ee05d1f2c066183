"""Attention of all images at once, by their bounds: in the layers that we trace, and there alone.

While a layer is traced that was given `longest`, the fork's question is answered with yes, and the attention function
gets a mask by its bounds. transformers' own function goes on from there: what it makes of a mask is in the graph.
Nothing is assigned to a config, and other calls of the model see nothing of it.

The fork of transformers' towers is between attention of all images at once, and of each image in a loop. A tower has
one row of patches, and bounds that say where each image begins. Where the config requests flash attention, the
attention function gets the bounds; elsewhere `lengths.tolist()` splits the row, and a loop calls the function for each
image: a graph break, a graph a number of images, a graph a size. The fork is read in the source of the module.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile.integrations.kernel_functions.substitute import HOME, Substitution, is_own, trace_in_place_of
from tunecompile.integrations.registered.names import NAME
from tunecompile.notes import Note, note
from tunecompile.ops import document_mask

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


class Bounds:
    """What a layer that is traced knows of its images. Set while Dynamo traces, and never when compiled code runs."""

    def __init__(self) -> None:  # attributes of its own, as `Documents` has one
        self.given: Tensor | None = None  #: int [images + 1], as the layer was given it
        self.offsets: Tensor | None = None  #: int32, the same for ops
        self.longest: int | None = None  #: patches of the largest image, or more


BOUNDS = Bounds()
_SDPA = "transformers.integrations.sdpa_attention"
_OURS = "tunecompile.integrations.registered.functions"


def requested(itself: Callable) -> Callable:
    """Whether attention by bounds is requested."""

    def traced(config: Any = None, requested_attention_implementation: str | None = None, version: Any = None) -> bool:
        if config is not None and version is None and BOUNDS.longest is not None:
            return True
        return itself(config, requested_attention_implementation, version)

    return traced


def longest_of(itself: Callable) -> Callable:
    """The length of the longest image, which nobody reads here: it would be a wait for the device."""

    def traced(cu_seqlens: Tensor, config: Any, *args: Any, **kwargs: Any) -> int | None:
        if BOUNDS.longest is not None:
            return None
        return itself(cu_seqlens, config, *args, **kwargs)

    return traced


def _by_mask(itself: Callable, added: bool) -> Callable:
    """An attention function that is told of bounds as a mask; `added` to scores, or of bools."""

    def traced(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        offsets = kwargs.get("cu_seq_lens_q")
        if offsets is None or attention_mask is not None or kwargs.get("is_causal", True) or BOUNDS.longest is None:
            return itself(module, query, key, value, attention_mask, *args, **kwargs)
        total = query.shape[2]
        if offsets is BOUNDS.given:
            mask = document_mask(BOUNDS.offsets, BOUNDS.longest, total, 0, False)
        else:
            mask = document_mask(offsets.to(torch.int32), total, total, 0, False)
        if added:
            mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
        kept = {name: value for name, value in kwargs.items() if name not in TOLD}
        return itself(module, query, key, value, mask, *args, **kept)

    return traced


def trace_by_bounds(kinds: Iterable[type]) -> list[Substitution]:
    """Prepare classes of modules whose code forks: functions that it calls are traced as above.

    Returns:
        What became of each class.
    """
    found = []
    for kind in kinds:
        if kind.__module__.startswith(HOME) and kind not in _forks and (fork := fork_of(kind.forward)) is not None:
            refused = _prepare(kind)
            if refused is None:
                _forks[kind] = fork
            found.append(Substitution(f"{kind.__module__}.{kind.__name__}", refused))
    return found


_forks: dict[type, Fork] = {}  #: classes whose functions are traced by bounds


def forks_in(layer: nn.Module) -> list[tuple[nn.Module, Fork]]:
    """The modules inside whose code forks, where that can be traced by bounds."""
    return [(module, _forks[type(module)]) for module in layer.modules() if type(module) in _forks]


def takes_bounds(module: nn.Module, fork: Fork) -> bool:
    """Whether the attention function that a module calls now is one that can be told of bounds."""
    name = module.config._attn_implementation
    if name == "eager":
        return not fork.reads_weights
    places = {"sdpa": (_SDPA, "sdpa_attention_forward"), NAME: (_OURS, "attention")}  # ours goes on to torch's
    home, function = places.get(name, ("", ""))
    known = getattr(sys.modules.get(home), function, None)
    table = getattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS", None)
    return known is not None and table is not None and table.get(name) is known


def _prepare(kind: type) -> Note | None:
    """Why functions that a module of this class calls cannot be traced by bounds; None where they are."""
    here = sys.modules[kind.__module__]
    wanted = {
        TEST: requested,
        "get_max_seqlen": longest_of,
        "eager_attention_forward": functools.partial(_by_mask, added=True),
    }
    functions = [(getattr(here, name, None), make) for name, make in wanted.items()]
    functions += [
        (getattr(sys.modules.get(_SDPA), "sdpa_attention_forward", None), functools.partial(_by_mask, added=False))
    ]
    for function, make in functions:
        if not isinstance(function, types.FunctionType) or not is_own(function, sys.modules[function.__module__]):
            return note("kernel-function-replaced", f"{kind.__module__}, of which {kind.__name__} calls a function,")
        if function not in _traced:
            if (refused := trace_in_place_of(function, make, f"{function.__module__}.{function.__name__}")) is not None:
                return refused
            _traced.add(function)
    return None


_traced: set[Callable] = set()
