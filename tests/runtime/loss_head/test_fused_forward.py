"""Which heads of a fused forward can be ours."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.support.notes import has
from tunecompile.integrations.bitsandbytes import STATE
from tunecompile.runtime.loss_head import fused_forward
from tunecompile.runtime.loss_head.fused_forward import FusedForward, _scores
from tunecompile.runtime.step.mode import Mode
from tunecompile.runtime.step.state import Step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_scores_are_those_of_the_heads_logits(dtype, biased):
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(4, 6, dtype=dtype), torch.randn(9, 6), torch.tensor([0, 3, 8, 3])
    bias = torch.randn(9) if biased else None
    given = dict(hidden=hidden, weight=weight, bias=bias, labels=labels, outputs=())
    found, *others = _scores(SimpleNamespace(**given, logit_scale=0.5, temperature=0.7, softcap=5.0))
    logits = F.linear(hidden, weight.to(dtype), None if bias is None else bias.to(dtype)).double() * 0.5
    expected = (5 * (logits / 5).tanh() / 0.7).log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
    assert others == [None] * len(others)


def test_a_head_of_four_bits_is_dequantised(monkeypatch):
    weight, state, whole = torch.ones(3, 1, dtype=torch.uint8), object(), torch.randn(5, 6)
    setattr(weight, STATE, state)
    monkeypatch.setattr(
        fused_forward, "from_4_bits", lambda *given: whole if given[0] is weight and given[1] is state else None
    )
    hidden, labels = torch.randn(2, 6), torch.tensor([4, 0])
    call = dict(hidden=hidden, weight=weight, bias=None, labels=labels, outputs=())
    found, *_ = _scores(SimpleNamespace(**call, logit_scale=1.0, temperature=1.0, softcap=None))
    torch.testing.assert_close(found, (hidden @ whole.t()).log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1))


def test_scores_that_are_others_are_the_packages_own(monkeypatch):
    """And the report says so. An evaluation is no step: nothing is said of it."""
    same = []
    monkeypatch.setattr(fused_forward.trl, "same_scores", lambda ours, theirs, call: same.append(call) or False)
    fused = SimpleNamespace(step=Step(mode=Mode.TRAIN), known={})
    call = SimpleNamespace(hidden=torch.ones(1, 2), weight=torch.ones(3, 2), bias=None, temperature=1.0, options=(0.5,))
    for _ in range(2):
        assert has([FusedForward.score(fused, call, None)], "fused-head-computes-else")
    assert same == [call], "options are looked at once"

    def small(*_):
        raise ValueError("37 is no multiple of 64")

    monkeypatch.setattr(fused_forward.trl, "same_scores", small)
    fused.known.clear()
    assert has([FusedForward.score(fused, call, None)], "fused-head-not-compared", subject="no multiple of 64")
    fused.step.mode = Mode.EAGER
    assert FusedForward.score(fused, call, None) is None
