"""Attention weights that a layer returns and its caller did not request: made if somebody reads them all the same.

Blocks of MPT, GPT-J, CodeGen, GPT-Neo and BLOOM return their weights, which their models read where
`output_attentions` is true. Where it is given as False, compiled code returns weights of no row, and keeps no scores.
Bamba's blocks are not told: its model collects weights by hooks on attention, and drops what blocks return.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tunecompile.runtime.watch.late_tensor import LateTensor

REQUEST = "output_attentions"  #: the argument by which a caller requests weights


def are_unread(kwargs: dict[str, Any], by_hooks: bool = False) -> bool:
    """Return whether the caller of a layer does not read attention weights, as far as it says.

    Args:
        kwargs: of the layer's call.
        by_hooks: whether its model collects weights by hooks on attention, of which there are none now.
    """
    return kwargs[REQUEST] is False if REQUEST in kwargs else by_hooks


def unread(output: Any, make: Callable[[], Any]) -> Any:
    """Return a layer's output, with weights in the place of those of no row that compiled code returned.

    Args:
        output: of the compiled code.
        make: runs the layer's own code, and returns its output.
    """
    if not isinstance(output, tuple) or not any(map(_is_of_no_row, output)):
        return output
    rows = next((each.shape[0] for each in output if isinstance(each, Tensor) and not _is_of_no_row(each)), 0)
    device = next(each.device for each in output if isinstance(each, Tensor))
    run = _as_now(make, device.type)
    return tuple(
        UnreadWeights((rows, *each.shape[1:]), each.dtype, each.device, lambda place=place: run()[place])
        if _is_of_no_row(each)
        else each
        for place, each in enumerate(output)
    )


def _is_of_no_row(given: Any) -> bool:
    return isinstance(given, Tensor) and given.dim() == 4 and given.shape[0] == 0


def _as_now(make: Callable[[], Any], device: str) -> Callable[[], Any]:
    """`make`, with gradients and in the precision of this moment."""
    gradients, casts = torch.is_grad_enabled(), torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device)

    def run() -> Any:
        with torch.set_grad_enabled(gradients), torch.autocast(device, dtype, enabled=casts):
            return make()

    return run


class UnreadWeights(LateTensor):
    """Weights that are made when they are read, as the layer's own code gives them."""
