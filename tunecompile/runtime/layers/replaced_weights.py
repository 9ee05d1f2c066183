"""Weights whose memory is replaced behind a piece of a layer: the backward reads what the piece was given.

Hooks inside a layer may give a weight another memory for each call (`weight.data = ...`): weights that are stored in
float8 and cast for their products, or that stay on the host. Such a layer has graph breaks. In eager a product saves a
view of the weight, which still holds what was multiplied. A compiled piece saves its inputs, the weights themselves, so
that its backward would read what they hold by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tunecompile._torch.fake_tensors import wraps_tensors


def given_views_of_replaced(compiled: Callable) -> Callable:
    """Return `compiled`, a piece of a layer, which is given views of its weights where their memory is replaced.

    The first call decides: it is given views, and by the next one its weights hold what they held, or not.
    """
    held: list[tuple[weakref.ref[Tensor], Tensor]] = []  # the views keep their memory, so that no other has its address
    replaced: bool | None = None

    def run(*args: Any) -> Any:
        nonlocal replaced
        if replaced is None and held:
            replaced = any((weight := ref()) is not None and not _is_there(weight, view) for ref, view in held)
            held.clear()
        if replaced is False:
            return compiled(*args)
        given = [_view(each) if isinstance(each, nn.Parameter) and not wraps_tensors(each) else each for each in args]
        if replaced is None:
            held.extend((weakref.ref(each), view) for each, view in zip(args, given) if each is not view)
            replaced = None if held else False
        return compiled(*given)

    return run


def _view(weight: Tensor) -> Tensor:
    return weight.view_as(weight) if weight.requires_grad else weight.detach()


def _is_there(weight: Tensor, view: Tensor) -> bool:
    """Whether the weight still holds the memory of its view."""
    return weight.dtype == view.dtype and weight.device == view.device and weight.data_ptr() == view.data_ptr()
