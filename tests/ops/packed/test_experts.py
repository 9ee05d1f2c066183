"""Which packed stacks the template of few rows takes, as if there were a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tunecompile._torch.card import acting_as
from tunecompile.ops.packed.experts import refuse_packed

EXPERTS, N, K = 4, 64, 128


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, None),
        ({"blocksize": 32}, None),  # MXFP4's
        ({"scales_on": "cpu"}, "not-on-gpu"),  # as bitsandbytes leaves them where a quantised model is moved
        ({"blocksize": 16}, "arguments-not-supported"),
        ({"adapters": 2}, "arguments-not-supported"),
        ({"tokens": 600}, "too-many-rows"),
        ({"strides": (1, EXPERTS * N * K // 4)}, "not-contiguous"),
    ],
)
def test_what_is_refused(changes, code):
    given = {"blocksize": 64, "scales_on": "cuda", "adapters": 0, "tokens": 8, "strides": (2, 1)} | changes
    with FakeTensorMode(), acting_as("h100"):
        x = torch.empty(given["tokens"], K, dtype=torch.bfloat16, device="cuda")
        shape = EXPERTS * N * K // 4, 2
        codes = torch.empty_strided(shape, given["strides"], dtype=torch.uint8, device="cuda")
        scales = torch.empty(EXPERTS * N * K // given["blocksize"], device=given["scales_on"])
        a, b = (torch.empty(shape, device="cuda") for shape in ((EXPERTS * 4, K), (N, 4 * EXPERTS)))
        adapters, offsets = given["adapters"], torch.empty(EXPERTS, dtype=torch.int32, device="cuda")
        why = refuse_packed(x, codes, scales, offsets, [a] * adapters, [b] * adapters, None, N, given["blocksize"])
    assert (why and why.code) == code
