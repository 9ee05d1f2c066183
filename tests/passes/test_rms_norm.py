"""RMSNorm in the spellings of real models."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.passes import run
from tests.support.passes.norms import EPS, llama_norm, stat
from tests.support.passes.run import family, random
from tests.support.passes.traced import recognized
from tunecompile.ops import rms_norm

PASSES = family("rms_norm")
check = partial(run.check, passes=PASSES)


def swapped(x, w):
    h = x.float()
    return (torch.rsqrt(EPS + torch.mean(torch.square(h), dim=-1, keepdim=True)) * h).type_as(x) * w


def product(x, w):
    h = x.type(torch.float32)
    return torch.mul(w, (h * (h * h).mean(dim=[-1], keepdim=True).add(EPS).rsqrt()).to(dtype=x.dtype))


def power(x, w):
    h = x.to(dtype=torch.float32)
    return w * (h * torch.rsqrt((h**2.0).mean((-1,), True) + EPS)).to(x)


def method_mean(x, w):
    h = x.float()
    return w * torch.multiply(h, torch.rsqrt(torch.add(torch.pow(h, 2).mean(-1, True), EPS))).to(x.dtype)


def t5(x, w):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(variance + EPS)).to(w.dtype)


def olmo(x, w):
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return (w * x).to(dtype)


def olmo_wide_weight(x, w):
    h = x.float()
    return ((h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)) * w.float()).to(x.dtype)


def gemma(x, w):
    def norm(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)

    return (norm(x.float()) * (1.0 + w.float())).type_as(x)


def gemma_backwards(x, w):
    h = x.float()
    return ((w.float() + 1) * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS))).to(x.dtype)


def gemma4(x, w):
    h = x.float()
    return (h * torch.pow(h.pow(2).mean(-1, keepdim=True) + EPS, -0.5) * w.float()).type_as(x)


def functional(x, w):
    return F.rms_norm(x, (x.shape[-1],), w, EPS)


def keywords(x, w):
    return F.rms_norm(x, normalized_shape=(x.shape[-1],), weight=w, eps=EPS)


def divided(x, w):
    return (x * stat(x, w)) / w


def read_twice(x, w):
    n = x * stat(x, w)
    return w * n + n


def in_fp64(x, w):
    h = x.double()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def without_weight(x, w):
    """Gemma 4's norm of values, and Llama 4's of queries and keys, which are read as heads."""
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).type_as(x).transpose(0, 1) * w.sum()


def functional_without_weight(x, w):
    return F.rms_norm(x, (x.shape[-1],), eps=EPS) * w.sum()


SPELLINGS = [
    llama_norm,
    swapped,
    product,
    power,
    method_mean,
    t5,
    olmo,
    olmo_wide_weight,
    gemma,
    gemma_backwards,
    gemma4,
    functional,
    keywords,
    without_weight,
    functional_without_weight,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_matches(spelling, dtype):
    check(
        spelling,
        random(2, 3, 8, dtype=dtype),
        random(8, dtype=dtype),
        expect={"rms_norm": 1},
        tol=1e-5 if dtype == torch.float32 else 1.2e-2,
    )


@pytest.mark.parametrize("spelling", [llama_norm, gemma, olmo, functional])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_weight_of_another_dtype(spelling, dtypes):
    """Whether it matches or not: values and dtypes are eager's."""
    check(spelling, random(2, 3, 8, dtype=dtypes[0]), random(8, dtype=dtypes[1]), tol=1.2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("eps", [1e-6, None])
def test_torch_module(eps, dtype):
    """Small inputs tell one eps from another. torch's default is the epsilon of the arithmetic, fp32, not of the tensor."""
    module = nn.RMSNorm(8, eps=eps).to(dtype)
    check(
        module,
        random(2, 3, 8, dtype=dtype, scale=1e-3),
        parameters=list(module.parameters()),
        expect={"rms_norm": 1},
        tol=1e-5 if dtype == torch.float32 else 1.2e-2,
    )


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)),
        lambda x, w: F.rms_norm(x, (8,), w, 1e-3),
    ],
)
def test_dynamic_shapes(fn):
    check(fn, random(2, 3, 8), random(8), expect={"rms_norm": 1}, dynamic=True)


def test_a_dynamic_epsilon_is_made_a_constant():
    check(functional, random(2, 3, 8), random(8), dynamic=True)


def test_several_in_a_row_through_other_work():
    def fn(x, w, v):
        return llama_norm(torch.sin(llama_norm(x, w)), v) + gemma(x, v)

    check(fn, random(2, 3, 8), random(8), random(8), expect={"rms_norm": 3})


def test_a_norm_of_a_norm():
    check(
        lambda x, w, v: llama_norm(llama_norm(x, w), v), random(2, 3, 8), random(8), random(8), expect={"rms_norm": 2}
    )


@pytest.mark.parametrize("shape", [(1,), (8, 8), (3, 1), ()])
def test_weight_of_another_shape(shape):
    """It is no weight of the norm, whose result it multiplies."""
    seen = check(
        llama_norm,
        random(2, 8, 8) if shape != (3, 1) else random(2, 3, 8),
        random(*shape),
        expect={"rms_norm": 1},
        tol=1e-5,
    )
    assert "new_ones" in str(seen.graphs[0])


def test_unrounded_result():
    """bf16 in, fp32 out: what is normed is the fp32 copy, since rounding to bf16 would be ours, not the model's."""

    def fn(x, w):
        h = x.float()
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * w

    check(fn, random(2, 3, 8, dtype=torch.bfloat16), random(8, dtype=torch.bfloat16), expect={"rms_norm": 1}, tol=1e-2)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w,
        lambda x, w: w * x * stat(x, w),
        lambda x, w: x * stat(x, w) * (1.0 - w),
        lambda x, w: w * (F.normalize(x, dim=-1) * 8**0.5),
    ],
)
def test_spellings_not_known_yet_are_right(fn):
    check(fn, random(4, 8), random(8))


@pytest.mark.parametrize("spelling", [divided, read_twice, in_fp64])
def test_a_norm_without_a_weight_ends_where_its_result_is_read(spelling):
    check(spelling, random(2, 3, 8), random(8), expect={"rms_norm": 1}, tol=1e-5)


TOLD = [(gemma, 1.0, False), (gemma_backwards, 1.0, False), (olmo, 0.0, False), (t5, 0.0, True), (swapped, 0.0, True)]


@pytest.mark.parametrize("spelling, offset, rounded", TOLD)
def test_what_the_op_is_told(spelling, offset, rounded):
    """The weight as the model holds it, and what is added to it: 1 + w computed before would be saved in its place."""
    x, w = random(2, 3, 8, dtype=torch.bfloat16), random(8, dtype=torch.bfloat16)
    graph, _ = recognized(spelling, x, w, passes=PASSES, expect={"rms_norm": 1}, tol=1.2e-2)
    (call,) = graph.find_nodes(op="call_function", target=rms_norm.overload)
    assert call.args == (*graph.find_nodes(op="placeholder"), EPS, offset, rounded)
