"""Siblings that share x become one op, unless something stands between them."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes import run
from tests.support.passes.functions import Siblings, lora, operands
from tests.support.passes.run import family, random
from tunecompile.ops import gated_activation

check = partial(run.check, passes=family("lora", "grouped_linear"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("number", [2, 3])
def test_siblings(number, bias, dtype):
    layer = Siblings(number, bias=bias, dtype=dtype)
    check(
        layer,
        random(2, 3, 8, dtype=dtype),
        expect={"lora_linear": 1},
        parameters=layer.trained(),
        tol=1e-5 if dtype == torch.float32 else 2e-2,
    )


def test_dynamic_shapes():
    layer = Siblings(3)
    check(layer, random(2, 3, 8), expect={"lora_linear": 1}, parameters=layer.trained(), rows=(0, 1))


def test_work_between_the_siblings():
    def fn(x, *o):
        q = torch.sin(lora(x, *o[:3]))
        k = lora(x, *o[3:]) * q
        return q, k

    check(fn, random(2, 3, 8), *operands(), *operands(), expect={"lora_linear": 1})


def test_a_sibling_that_is_not_read():
    check(lambda x, *o: (lora(x, *o[:3]), lora(x, *o[3:]).detach()), random(2, 3, 8), *operands(), *operands())


def test_one_weight_twice():
    check(lambda x, *o: lora(x, *o) * lora(x, *o, scale=2.0), random(2, 3, 8), *operands(), expect={"lora_linear": 1})


def test_with_and_without_bias_and_of_another_input():
    check(
        lambda x, *o: (lora(x, *o[:3]), lora(x, *o[3:])),
        random(2, 3, 8),
        *operands(),
        *operands(bias=True),
        expect={"lora_linear": 2},
    )
    check(
        lambda x, *o: (lora(x, *o[:3]), lora(torch.sin(x), *o[3:])),
        random(2, 3, 8),
        *operands(),
        *operands(),
        expect={"lora_linear": 2},
    )


def test_biases_that_are_computed():
    """From parameters alone, as those of adapters with a bias of their own (PEFT's lora_bias)."""

    def one(x, w, a, b, own):
        return F.linear(x, w) + F.linear(F.linear(x, a), b, own) * 0.5

    check(
        lambda x, *o: (one(x, *o[:4]), one(x, *o[4:])),
        random(2, 3, 8),
        *operands(bias=True),
        *operands(bias=True),
        expect={"lora_linear": 1},
    )
    seen = check(
        lambda x, *o: (lambda q: (q, one(x, *o[4:7], o[7] * q.detach().mean())))(one(x, *o[:4])),
        random(2, 3, 8),
        *operands(bias=True),
        *operands(bias=True),
        expect={"lora_linear": 2},
    )
    assert any("later values" in reason for reason in seen.refused)


def test_weights_computed_from_the_first_ones_result():
    check(
        lambda x, *o: (lambda q: (q, lora(x, o[3] * q.detach().mean(), *o[4:])))(lora(x, *o[:3])),
        random(2, 3, 8),
        *operands(),
        *operands(),
        expect={"lora_linear": 2},
    )


def test_an_input_computed_from_the_first_ones_result():
    def fn(x, *o):
        q = lora(x, *o[:3])
        z = F.dropout(q[..., :1] + x, 0.0)
        return q, F.linear(x, o[3]) + F.linear(F.linear(z, o[4]), o[5]) * 0.5

    check(fn, random(2, 3, 8), *operands(), *operands())


@pytest.mark.parametrize("what", ["x", "adapter", "weight"])
def test_never_across_a_mutation(what):
    def fn(x, w, a, b, w2, a2, b2):
        x, a2, w2 = x * 1.0, a2 * 1.0, w2 * 1.0
        q = lora(x, w, a, b)
        {"x": x, "adapter": a2, "weight": w2}[what].add_(1.0)
        return q, lora(x, w2, a2, b2)

    check(fn, random(2, 3, 8, grad=False), *(t.detach() for t in operands()), *(t.detach() for t in operands()))


@pytest.mark.parametrize("frozen", [0, 1])
def test_never_across_a_change_of_grad_mode(frozen):
    def fn(x, *o):
        made = []
        for i in range(2):
            with torch.set_grad_enabled(i != frozen):
                made.append(lora(x, *o[3 * i : 3 * i + 3]))
        return made[0] * made[1]

    check(fn, random(2, 3, 8), *operands(), *operands())


def test_a_result_that_is_changed_in_place():
    def fn(x, *o):
        q, k = lora(x, *o[:3]), lora(x, *o[3:])
        q += 1.0
        return q * k

    check(fn, random(2, 3, 8), *operands(), *operands(), passes=[])


@pytest.mark.parametrize("how", ["index_copy_", "setitem"])
def test_a_result_that_is_copied_to_a_cache(how):
    def fn(x, cache, *o):
        k, v = lora(x, *o[:3]), lora(x, *o[3:])
        cache = cache * 1.0
        if how == "setitem":
            cache[:, 1:4] = v.view(v.shape)
        else:
            cache.index_copy_(1, torch.arange(1, 4), v.view(v.shape))
        return k * cache[:, 1:4] + cache[:, :1]

    given = random(2, 3, 8), random(2, 5, 6), *operands(), *operands()
    check(fn, *(each.detach() for each in given), expect={"lora_linear": 1})


def test_autocast_with_fp32_parameters():
    layer = Siblings(3)
    with torch.autocast("cpu", torch.bfloat16):
        check(layer, random(2, 3, 8), parameters=layer.trained(), tol=2e-2)


def test_autocast_with_fp32_parameters_is_grouped():
    layer = Siblings(3)
    with torch.autocast("cpu", torch.bfloat16):
        check(layer, random(2, 3, 8), expect={"lora_linear": 1}, parameters=layer.trained(), tol=2e-2)


@pytest.mark.parametrize("cast", [False, True])
def test_an_mlp_beside_attention_has_a_group_of_its_own(cast):
    def fn(x, *o):
        q, gate, k, up = (lora(x, *o[i : i + 3]) for i in (0, 3, 6, 9))
        return q * k, F.silu(gate.to(torch.float32) if cast else gate) * up

    seen = check(
        fn,
        random(2, 3, 8),
        *operands(),
        *operands(),
        *operands(),
        *operands(),
        passes=family("lora", "swiglu", "grouped_linear"),
        expect={"lora_linear": 2, "gated_activation": 1},
    )
    up = next(node for node in seen.graphs[0].nodes if node.target is gated_activation.overload).args[1]
    assert len(up.args[0].users) == 2  # of its group: gate and itself


def test_dropout_on_one_sibling_only():
    def fn(x, *o):
        return lora(x, *o[:3]), F.linear(x, o[3]) + F.linear(F.linear(F.dropout(x, 1.0), o[4]), o[5]) * 0.5

    check(fn, random(2, 3, 8), *operands(), *operands(), expect={"lora_linear": 2})


def test_dropout_with_p_1_draws_nothing():
    layer = Siblings(2, dropout=1.0)
    check(layer, random(2, 3, 8), expect={"lora_linear": 1}, parameters=layer.trained())
