"""GELU written out is torch's, and nothing else is."""

import math
from functools import partial

import pytest
import torch

from tests.support.passes import run
from tests.support.passes.run import family, random

check = partial(run.check, passes=family("gelu"))
ROOT = math.sqrt(2 / math.pi)

SPELLINGS = {
    "GPT-2": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "half behind": lambda x: x * 0.5 * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3)))),
    "power": lambda x: 0.5 * x * (torch.tanh((x + 0.044715 * x**3) * ROOT) + 1),
    "factored": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "erf": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
}
OTHERS = {
    "another cubic term": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.04 * torch.pow(x, 3.0)))),
    "a square": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 2.0)))),
    "another root": lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.5)),
    "another factor": lambda x: x.sin() * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
}


def gelus(seen):
    return sum(t.rewritten for context in seen.contexts for t in context.tallies if t.family == "gelu")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_spellings(spelling, dtype):
    seen = check(SPELLINGS[spelling], random(2, 3, 8, dtype=dtype), tol=2e-6 if dtype == torch.float32 else 2e-2)
    assert gelus(seen) == 1


@pytest.mark.parametrize("other", OTHERS)
def test_near_misses(other):
    seen = check(OTHERS[other], random(2, 3, 8))
    assert gelus(seen) == 0 and seen.refused


def test_a_gate_written_out():
    seen = run.check(
        lambda x, up: SPELLINGS["GPT-2"](x) * up,
        random(2, 3, 8),
        random(2, 3, 8),
        passes=family("gelu", "swiglu"),
        expect={"gated_activation": 1},
    )
    assert gelus(seen) == 1
