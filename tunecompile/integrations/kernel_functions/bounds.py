"""Attention of all images at once, by their bounds: in the layers that we trace, and there alone.

While a layer is traced that was given `longest`, the fork's question is answered with yes, and the attention function
gets a mask by its bounds. transformers' own function goes on from there: what it makes of a mask is in the graph.
Nothing is assigned to a config, and other calls of the model see nothing of it.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile.integrations.kernel_functions.fork import TEST, TOLD, Fork, fork_of
from tunecompile.integrations.kernel_functions.substitute import HOME, Substitution, is_own, trace_in_place_of
from tunecompile.integrations.registered.names import NAME
from tunecompile.notes import Note, note
from tunecompile.ops import document_mask


class Bounds:
    """What a layer that is traced knows of its images. Set while Dynamo traces, and never when compiled code runs."""

    def __init__(self) -> None:  # attributes of its own, as `Documents` has one
        self.given: Tensor | None = None  #: int [images + 1], as the layer was given it
        self.offsets: Tensor | None = None  #: int32, the same for ops
        self.longest: int | None = None  #: patches of the largest image, or more


BOUNDS = Bounds()
_SDPA = "transformers.integrations.sdpa_attention"
_OURS = "tunecompile.integrations.registered.attention"


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
