"""Norms under autocast as on a GPU. A CPU's autocast leaves them in half precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from tunecompile._torch.autograd import no_autocast


@contextlib.contextmanager
def norms_as_on_a_gpu() -> Iterator[None]:
    """Inside, norms and powers under a CPU's autocast take and give fp32, as on a GPU: eagerly, in Dynamo, in AOTAutograd."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("layer_norm", _layer_norm, "AutocastCPU")
        library.impl("pow.Tensor_Scalar", _power, "AutocastCPU")
        yield


def _layer_norm(x: Tensor, shape: list[int], weight=None, bias=None, eps: float = 1e-5, cudnn: bool = True) -> Tensor:
    given = [_wide(each) for each in (x, weight, bias)]
    with no_autocast():
        return torch.layer_norm(given[0], shape, given[1], given[2], eps, cudnn)


def _power(x: Tensor, exponent: float) -> Tensor:
    with no_autocast():
        return torch.pow(_wide(x), exponent)


def _wide(given: Tensor | None) -> Tensor | None:
    return given if given is None or given.dtype == torch.float64 else given.float()
