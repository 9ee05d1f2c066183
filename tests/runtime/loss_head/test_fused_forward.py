"""Which heads of a fused forward can be ours."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.notes import has
from tunecompile.runtime.loss_head.fused_forward import _unfit

REFUSED = {
    "no matrix": (torch.ones(3), 1.0),
    "whole numbers": (torch.ones(2, 3, dtype=torch.int64), 1.0),
    "no values": (torch.ones(2, 3, device="meta"), 1.0),
    "a kind of its own": (nn.Buffer(torch.ones(2, 3)).as_subclass(type("Kind", (torch.Tensor,), {})), 1.0),
    "a temperature of zero": (torch.ones(2, 3), 0.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_head_of_another_kind_is_the_packages_own(name):
    weight, temperature = REFUSED[name]
    assert has([_unfit(SimpleNamespace(weight=weight, temperature=temperature))], "fused-head-weight")


@pytest.mark.parametrize("weight", [torch.ones(2, 3), nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))])
def test_a_matrix_of_floats_is_ours(weight):
    assert _unfit(SimpleNamespace(weight=weight, temperature=0.7)) is None
