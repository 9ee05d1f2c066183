"""The pattern of LoRA in PEFT's own layers: biases, dtypes, merged adapters, dropout."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes import run
from tests.support.passes.functions import Siblings, peft_block, trained_block
from tests.support.passes.run import family, random
from tunecompile.compiler.backend import Backend
from tunecompile.passes import PIPELINE
from tunecompile.planner.solver import KEEP, RECOMPUTE

check = partial(run.check, passes=family("lora"))
GROUPED = family("lora", "grouped_linear")


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(r=4),
        dict(use_rslora=True),
        dict(rank_pattern={"q": 3}),
        dict(alpha_pattern={"k": 1}),
        dict(bias=True),
        dict(lora_bias=True, bias=True),
    ],
    ids=str,
)
def test_peft(options):
    bias = options.pop("bias", False)
    model = peft_block(bias, **options)
    check(model, random(2, 3, 8), expect={"lora_linear": 3}, parameters=trained_block(model))


def test_peft_trained_biases():
    model = peft_block(True, bias="all")
    assert any(n.endswith("bias") for n, p in model.named_parameters() if p.requires_grad)
    check(model, random(2, 3, 8), expect={"lora_linear": 3}, parameters=trained_block(model))


def test_peft_in_bf16_with_fp32_adapters():
    model = peft_block(dtype=torch.bfloat16)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = p.data.float()
    check(
        model,
        random(2, 3, 8, dtype=torch.bfloat16),
        expect={"lora_linear": 3},
        parameters=trained_block(model),
        tol=2e-2,
    )


def test_peft_merged_or_disabled_adapters():
    model = peft_block()
    for module in model.modules():
        if hasattr(module, "enable_adapters"):
            module.enable_adapters(False)
    check(model, random(2, 3, 8), expect={})


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_dropout_draws_one_mask_for_forward_and_backward(checkpoint, grouped):
    """The result is linear in x for a given mask, so <dy, y> = <dx, x> holds only if backward used the forward's mask; and the adapter's
    part is linear in B: <dB, B> = <dy, y - base>."""
    layer = Siblings(2 if grouped else 1, dropout=0.5).double()
    backend = Backend("test", PIPELINE, "eager", plan=RECOMPUTE if checkpoint else KEEP)
    x = torch.randn(4, 5, 8, dtype=torch.float64, requires_grad=True)
    y = torch.cat(torch.compile(layer, backend=backend)(x), -1)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert not backend.failures
    torch.testing.assert_close((grad * y).sum(), (x.grad * x).sum())
    base = torch.cat([F.linear(x, w) for w in layer.w], -1)
    share = ((y - base) * grad).detach()
    start = 0
    for w, a, b in zip(layer.w, layer.a, layer.b):
        mine = share[..., start : start + w.shape[0]].sum()
        torch.testing.assert_close((b.grad * b).sum(), mine)
        torch.testing.assert_close((a.grad * a).sum(), mine)
        start += w.shape[0]
    again = torch.cat(torch.compile(layer, backend=backend)(x), -1)
    assert not torch.equal(again, y), "a mask is drawn for every step"


def test_dropout_masks_of_siblings_differ():
    layer = Siblings(2, dropout=0.5, same=True)
    backend = Backend("test", PIPELINE, "eager")
    q, k = torch.compile(layer, backend=backend)(torch.randn(4, 16, 8, requires_grad=True))
    assert {t.family: t.rewritten for t in backend.contexts[0].tallies}["grouped_linear"] == 2
    assert not torch.equal(q, k)
