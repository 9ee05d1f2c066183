"""DoRA as PEFT writes it: the norms of adapted weights without an identity, and magnitudes beside an adapted linear. It is traced in one piece."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.passes import run
from tests.support.passes.functions import operands, peft_block, rows_of, trained_block
from tests.support.passes.run import family, random
from tunecompile._torch.fake_tensors import make_fx
from tunecompile.integrations.peft.trace import substitute
from tunecompile.ops import adapted_norm
from tunecompile.planner.candidates import expensive_nodes

PASSES, GROUPED = family("dora", "lora"), family("nf4", "dora", "lora", "grouped_linear")
check = partial(run.check, passes=PASSES)


def norms(w, a, b, scale=0.5):
    return torch.linalg.norm(
        w
        + scale
        * F.linear(F.linear(torch.eye(w.shape[1], device=w.device, dtype=a.dtype), a), b).T.to(w.dtype).detach(),
        dim=1,
    ).detach()


def dora(x, w, a, b, m, bias=None, scale=0.5, norm=norms):
    base, factor = F.linear(x, w, bias), (m / norm(w, a, b, scale)).view(1, -1)
    return base + (
        (factor - 1) * (base if bias is None else base - bias) + factor * F.linear(F.linear(x, a), b) * scale
    )


ALL = {"adapted_norm": 1, "lora_linear": 1}


@pytest.mark.parametrize("bias", [False, True])
def test_matches(bias):
    own = [random(6)] if bias else []
    check(dora, random(2, 3, 8), *operands(), random(6), *own, expect=ALL)
    check(dora, random(2, 3, 8), *operands(), random(6), *own, expect=ALL, rows=(0, 1), whole=False)
    half = [t.to(torch.bfloat16).detach().requires_grad_(t.requires_grad) for t in (*operands(), random(6), *own)]
    check(dora, random(2, 3, 8, dtype=torch.bfloat16), *half, expect=ALL, tol=3e-2)


def test_autocast():
    """The sum is fp32: so is the magnitude."""
    with torch.autocast("cpu", torch.bfloat16):
        seen = check(dora, random(2, 3, 8), *operands(), random(6), expect=ALL, tol=2e-2)
    assert not seen.refused


def of_rows(x, w, a, b, m, bias):
    base, factor = rows_of(x, w.T, bias), (m / norms(w, a, b)).view(1, -1)
    return base + ((factor - 1) * (base - bias) + factor * F.linear(F.linear(x, a), b) * 0.5)


def test_rows():
    check(of_rows, random(2, 3, 8), *operands(), random(6), random(6), expect=ALL)


def wrong(change):
    """`dora` with a factor, base and delta of another kind."""

    def fn(x, w, a, b, m, bias):
        return change(F.linear(x, w, bias), (m / norms(w, a, b)).view(1, -1), F.linear(F.linear(x, a), b), bias)

    return fn


NOT_THE_SUM = {
    "the magnitude itself": wrong(lambda base, f, delta, bias: base + (f * (base - bias) + f * delta * 0.5)),
    "less two": wrong(lambda base, f, delta, bias: base + ((f - 2) * (base - bias) + f * delta * 0.5)),
    "the bias too": wrong(lambda base, f, delta, bias: base + ((f - 1) * base + f * delta * 0.5)),
    "another bias": wrong(lambda base, f, delta, bias: base + ((f - 1) * (base - 2 * bias) + f * delta * 0.5)),
    "delta without magnitude": wrong(lambda base, f, delta, bias: base + ((f - 1) * (base - bias) + delta * 0.5)),
    "another magnitude": wrong(lambda base, f, delta, bias: base + ((f - 1) * (base - bias) + (f + 1) * delta * 0.5)),
    "one magnitude": wrong(lambda base, f, delta, bias: base + ((f.sum() - 1) * (base - bias) + f.sum() * delta * 0.5)),
    "magnitudes of each row": wrong(
        lambda base, f, delta, bias: (lambda g: base + ((g - 1) * (base - bias) + g * delta * 0.5))(
            base[..., :1].detach()
        )
    ),
    "taken off": wrong(lambda base, f, delta, bias: base - ((f - 1) * (base - bias) + f * delta * 0.5)),
    "base is read": wrong(lambda base, f, delta, bias: (base + ((f - 1) * (base - bias) + f * delta * 0.5)) * base),
}


@pytest.mark.parametrize("name", NOT_THE_SUM)
def test_another_sum(name):
    check(
        NOT_THE_SUM[name], random(2, 3, 8), *operands(), random(6), random(6), expect={"adapted_norm": 1}, whole=False
    )


def adapted(w, a, b, size=None):
    return F.linear(F.linear(torch.eye(*(size or (w.shape[1],)), dtype=a.dtype), a), b).T


NOT_THE_NORM = {
    "with a gradient": lambda w, a, b, scale: torch.linalg.norm(w + scale * adapted(w, a, b), dim=1).detach(),
    "by columns": lambda w, a, b, scale: torch.linalg.norm(
        (w + scale * adapted(w, a, b).detach()).T.reshape(6, 8), dim=1
    ).detach(),
    "of the absolute values": lambda w, a, b, scale: torch.linalg.norm(
        w + scale * adapted(w, a, b).detach(), ord=1, dim=1
    ).detach(),
    "a difference": lambda w, a, b, scale: torch.linalg.norm(w - scale * adapted(w, a, b).detach(), dim=1).detach(),
    "no identity": lambda w, a, b, scale: torch.linalg.norm(
        w + scale * F.linear(F.linear(torch.ones(8, 8), a), b).T.detach(), dim=1
    ).detach(),
    "of one row of a": lambda w, a, b, scale: torch.linalg.norm(
        w + scale * adapted(w, a[0], w.T.detach() @ w).detach(), dim=1
    ).detach(),
    "of one row of b": lambda w, a, b, scale: torch.linalg.norm(
        w + scale * adapted(w, a, b[0]).detach(), dim=1
    ).detach(),
    "a wide identity": lambda w, a, b, scale: torch.linalg.norm(
        w + scale * adapted(w, a, b, (8, 8)).detach(), dim=1
    ).detach(),
}


@pytest.mark.parametrize("name", NOT_THE_NORM)
def test_another_norm(name):
    def fn(x, w, a, b, m):
        return dora(x, w, a, b, m, norm=NOT_THE_NORM[name])

    check(fn, random(2, 3, 8), *operands(), random(6), expect={"lora_linear": 1}, whole=False)


# PEFT itself


def magnified(**options):
    model = peft_block(use_dora=True, **options)
    for name, p in model.named_parameters():
        if "magnitude" in name:
            p.data *= 1 + 0.2 * torch.randn_like(p)
    substitute()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"biased": True}, {"use_rslora": True, "r": 4}], ids=str)
def test_peft(options):
    model = magnified(**options)
    seen = check(
        model,
        random(2, 3, 8),
        passes=GROUPED,
        expect={"adapted_norm": 3, "lora_linear": 2},
        parameters=trained_block(model),
    )
    assert len(seen.graphs) == 1


@pytest.mark.slow
def test_peft_with_dropout():
    """The base is multiplied twice, by what is dropped and by what is not."""
    model = magnified(lora_dropout=0.5)
    seen = check(
        model, random(2, 3, 8), passes=GROUPED, expect={"adapted_norm": 3}, parameters=trained_block(model), tol=9
    )
    assert len(seen.graphs) == 1 and len(seen.refused) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "double, storage", [(True, torch.uint8), (False, torch.uint8), (True, torch.bfloat16)], ids=str
)
def test_peft_over_4_bits(double, storage):
    peft, _ = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")
    from tests.support import zoo

    block = zoo.quantize(
        nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 128)), double=double, storage=storage
    )
    model = peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=["0", "2"], use_dora=True, init_lora_weights=False), block
    ).train()
    substitute()
    seen = check(
        model,
        random(2, 3, 64),
        passes=GROUPED,
        expect={"dequantize_4bit": 4, "adapted_norm": 2, "lora_linear": 2},
        parameters=trained_block(model),
        tol=5e-5 if all(p.dtype == torch.float32 for p in trained_block(model)) else 3e-2,
    )  # peft 0.18 gives adapters the dtype of the storage
    assert len(seen.graphs) == 1 and not seen.refused


def test_no_plan_is_about_norms():
    """They are vectors, and stay saved: computing them again would free nothing."""

    def fn(x, w, a, b):
        return (x @ w.t()) * adapted_norm(w, a, b, 0.5, torch.float32)

    graph = make_fx(fn, tracing_mode="fake")(torch.randn(3, 8), *(t.detach() for t in operands())).graph
    assert [node.target for node in expensive_nodes(graph)] == [torch.ops.aten.mm.default]
