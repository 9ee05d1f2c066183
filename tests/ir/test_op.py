"""What torch is told of an op."""

import pytest
import torch

from tunecompile.errors import InvalidOp
from tunecompile.ir.op import OPS, Cost, op


def test_torch_may_trace_every_op():
    """By this tag Dynamo's `only_allow_pt2_compliant_ops` knows that an op has shapes and gradients for it."""
    assert OPS and all(torch.Tag.pt2_compliant_tag in overload.tags for overload in OPS)


def test_a_name_that_is_taken_is_refused():
    def rms_norm(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(InvalidOp, match=r"rms_norm.*taken.*tunecompile\.ops"):
        op(cost=Cost.POINTWISE)(rms_norm)
