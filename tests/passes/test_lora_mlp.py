"""Adapted gate|up, activation and down become one op where a provider joins them, and only then."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes import run
from tests.support.passes.functions import lora, mlp, mlp_weights, operands
from tests.support.passes.run import family, random

check = partial(run.check, passes=family("nf4", "lora", "grouped_linear", "lora_nf4", "swiglu", "lora_mlp"))


ONE = {"lora_mlp": 1}
APART = {"lora_linear": 2, "gated_activation": 1}


@pytest.mark.parametrize("act", [F.silu, F.gelu, lambda g: F.gelu(g, approximate="tanh")])
def test_matches(joined, act):
    check(lambda x, *o: mlp(x, *o, act=act), random(2, 3, 8), *mlp_weights(), expect=ONE)


def test_autocast(joined):
    def fn(x, *o):
        with torch.autocast("cpu", torch.bfloat16):
            return mlp(x, *o)

    check(fn, random(2, 3, 8, dtype=torch.bfloat16), *mlp_weights(), expect=ONE, tol=3e-2)


def test_dynamic_shapes(joined):
    check(mlp, random(2, 3, 8), *mlp_weights(), expect=ONE, rows=(0, 1))


def test_two_in_a_row(joined):
    check(lambda x, *o: mlp(x + mlp(x, *o), *o), random(2, 3, 8), *mlp_weights(), expect={"lora_mlp": 2})


def test_ranks_of_their_own(joined):
    o = [*operands(12, 8, r=1), *operands(12, 8, r=4), *operands(8, 12, r=3)]
    check(mlp, random(2, 3, 8), *o, expect=ONE)


def test_nothing_on_a_cpu():
    check(mlp, random(2, 3, 8), *mlp_weights(), expect=APART)


MUST_NOT = {
    "up first": lambda x, *o: (lambda up: lora(F.silu(lora(x, *o[:3])) * up, *o[6:]))(lora(x, *o[3:6])),
    "gate read elsewhere": lambda x, *o: (lambda gate: (lora(F.silu(gate) * lora(x, *o[3:6]), *o[6:]), gate))(
        lora(x, *o[:3])
    ),
    "activation read elsewhere": lambda x, *o: (lambda act: (lora(act, *o[6:]), act))(
        F.silu(lora(x, *o[:3])) * lora(x, *o[3:6])
    ),
    "activation changed": lambda x, *o: lora((F.silu(lora(x, *o[:3])) * lora(x, *o[3:6])) * 2, *o[6:]),
    "another input": lambda x, *o: lora(F.silu(lora(x, *o[:3])) * lora(torch.sin(x), *o[3:6]), *o[6:]),
    "gate rounded": lambda x, *o: lora(F.silu(lora(x, *o[:3]).bfloat16().float()) * lora(x, *o[3:6]), *o[6:]),
    "gate shifted": lambda x, *o: lora(F.silu(lora(x, *o[:3]) + 1) * lora(x, *o[3:6]), *o[6:]),
}


@pytest.mark.parametrize("spelling", MUST_NOT)
def test_does_not_match(joined, spelling):
    assert "lora_mlp" not in check(MUST_NOT[spelling], random(2, 3, 8), *mlp_weights()).ops


def test_biases_and_dropout_stay_apart(joined):
    biased = [*operands(12, 8, bias=True), *operands(12, 8, bias=True), *operands(8, 12)]

    def fn(x, *o):
        return lora(F.silu(lora(x, *o[:4])) * lora(x, *o[4:8]), *o[8:])

    seen = check(fn, random(2, 3, 8), *biased, expect=APART)
    assert any("bias" in reason for reason in seen.refused)


def test_an_adapter_on_down_alone_is_no_near_miss(joined):
    def fn(x, gate, up, *o):
        return lora(F.silu(F.linear(x, gate)) * F.linear(x, up), *o)

    seen = check(fn, random(2, 3, 8), random(12, 8), random(12, 8), *operands(8, 12))
    assert "lora_mlp" not in seen.ops and not seen.refused


def test_adapters_in_another_dtype_stay_apart(joined):
    def fn(x, *o):
        def wide(x, w, a, b):
            return (F.linear(x, w) + F.linear(F.linear(x.to(a.dtype), a), b) * 0.5).to(x.dtype)

        return wide(F.silu(wide(x, *o[:3])) * wide(x, *o[3:6]), *o[6:])

    check(
        fn,
        random(2, 3, 8, dtype=torch.bfloat16),
        *mlp_weights(dtype=torch.bfloat16, adapters=torch.float32),
        expect=APART,
        tol=3e-2,
    )


def test_dequantised_weights(joined):
    pytest.importorskip("bitsandbytes")
    from tests.support.passes.functions import linear_4bit

    gate, up, down = linear_4bit(n=128), linear_4bit(n=128), linear_4bit(n=64, k=128)

    def one(layer, x, a, b):
        return layer(x) + F.linear(F.linear(x, a), b) * 0.5

    def fn(x, *o):
        return one(down, F.silu(one(gate, x, *o[:2])) * one(up, x, *o[2:4]), *o[4:])

    o = [t for n, k in ((128, 64), (128, 64), (64, 128)) for t in (random(2, k), random(n, 2))]
    check(fn, random(2, 3, 64), *o, expect={"dequantize_4bit": 3, "lora_mlp": 1}, tol=5e-5)


HALVES = {
    "split": lambda y: y.split(12, -1),
    "chunk": lambda y: y.chunk(2, dim=-1),
    "torch.split": lambda y: torch.split(y, [12, 12], 2),
}
NOT_HALVES = {
    "up first": lambda y: y.chunk(2, -1)[::-1],
    "tokens": lambda y: y.chunk(2, 1),
    "half read elsewhere": lambda y: (lambda halves: (halves[0], halves[1] + halves[0].sin()))(y.chunk(2, -1)),
    "thirds": lambda y: y.split(8, -1)[:2],
}


@pytest.mark.parametrize("halves", HALVES)
def test_one_projection_that_gives_gate_and_up(joined, halves):
    def fn(x, *o):
        gate, up = HALVES[halves](lora(x, *o[:3]))
        return lora(F.silu(gate) * up, *o[3:])

    check(fn, random(2, 3, 8), *operands(24, 8), *operands(8, 12), expect=ONE)


@pytest.mark.parametrize("halves", NOT_HALVES)
def test_what_are_no_halves_of_one_projection(joined, halves):
    def fn(x, *o):
        gate, up = NOT_HALVES[halves](lora(x, *o[:3]))
        return lora(F.silu(gate) * up, *o[3:])

    width = {"tokens": 24, "thirds": 8}.get(halves, 12)
    seen = check(fn, random(2, 4, 8), *operands(24, 8), *operands(8, width))
    assert "lora_mlp" not in seen.ops


def test_gate_and_up_without_autograd(joined):
    def fn(x, *o):
        with torch.no_grad():
            act = F.silu(lora(x, *o[:3])) * lora(x, *o[3:6])
        return lora(act, *o[6:]) + x

    assert "lora_mlp" not in check(fn, random(2, 3, 8), *mlp_weights()).ops
