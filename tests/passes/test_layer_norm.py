"""LayerNorm in the spellings of real models, near misses, and the residual add before it."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.passes import run, traced
from tests.support.passes.norms import centred_norm
from tests.support.passes.run import family, random
from tunecompile.ops import layer_norm
from tunecompile.passes.recognize.norms.layer_norm import anchors

PASSES = family("layer_norm", "add_layer_norm", "rms_norm")
recognized = partial(traced.recognized, passes=PASSES)
check = partial(run.check, passes=PASSES)
EPS = 1e-3


def functional(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b, EPS)


def keywords(x, w, b):
    return F.layer_norm(x, normalized_shape=(x.shape[-1],), weight=w, bias=b, eps=EPS)


def torchs(x, w, b):
    return torch.layer_norm(x, (x.shape[-1],), w, b, EPS, True)


def without_bias(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, None, EPS)


def one_plus(x, w, b):
    """As Nemotron has it."""
    return F.layer_norm(x, x.shape[-1:], w + 1, b, EPS)


def bare_in_fp32(x, w, b):
    """As OLMo has it."""
    return F.layer_norm(x.to(torch.float32), x.shape[-1:], None, None, eps=EPS).to(x.dtype)


def in_fp32(x, w, b):
    return F.layer_norm(x.float(), x.shape[-1:], w.float(), b.float(), EPS).type_as(x)


def cohere(x, w, b):
    dtype = x.dtype
    x = x.to(torch.float32)
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    x = (x - mean) * torch.rsqrt(variance + EPS)
    return (w.to(torch.float32) * x).to(dtype)


def shared(x, w, b):
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    return (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + EPS) * w.float()).to(x.dtype)


SPELLINGS = [functional, keywords, torchs, without_bias, one_plus, bare_in_fp32, in_fp32, cohere, shared]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_matches(spelling, dtype):
    args = random(2, 3, 8, dtype=dtype), random(8, dtype=dtype), random(8, dtype=dtype)
    tol = 1e-5 if dtype == torch.float32 else 1.2e-2
    check(spelling, *args, expect={"layer_norm": 1}, tol=tol)


def test_module_and_changing_sizes():
    module = nn.LayerNorm(8)
    parameters = list(module.parameters())
    check(module, random(2, 3, 8), parameters=parameters, expect={"layer_norm": 1}, dynamic=True)


def two_dims(x, w, b):
    return F.layer_norm(x, x.shape[-2:], None, None, EPS)


def of_another(x, w, b):
    mean = x.mean(-1, keepdim=True)
    return w * ((x - mean) * torch.rsqrt((x.sin() - mean).pow(2).mean(-1, keepdim=True) + EPS))


def another_mean(x, w, b):
    return w * (
        (x - x.mean(-1, keepdim=True)) * torch.rsqrt((x - x.mean(-2, keepdim=True)).pow(2).mean(-1, True) + EPS)
    )


def unbiased(x, w, b):
    return w * ((x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + EPS))


def result_in_fp32(x, w, b):
    return F.layer_norm(x.float(), x.shape[-1:], w.float(), b.float(), EPS).double()


def statistics_read(x, w, b):
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return w * (centred * torch.rsqrt(variance + EPS)) + variance


@pytest.mark.parametrize("mutation", [two_dims, of_another, another_mean, unbiased, statistics_read])
def test_does_not_match(mutation):
    check(mutation, random(8, 8), random(8), random(8), expect={})


def test_of_another_dtype():
    """Whether it matches or not: values and dtypes are eager's."""
    for fn in (functional, result_in_fp32):
        x, w, b = random(2, 8, dtype=torch.bfloat16), random(8), random(8)
        check(fn, x, w, b, tol=1.2e-2)


def test_weight_of_heads_does_not_match():
    """Cohere's queries and keys have a row of weights each."""
    check(cohere, random(2, 3, 8), random(3, 8), random(8), expect={})


def residual(x, r, w, b):
    total = x + r
    return functional(total, w, b), total


def test_residual():
    four = random(2, 3, 8), random(2, 3, 8), random(8), random(8)
    check(residual, *four, expect={"add_layer_norm": 1})
    check(lambda *args: residual(*args)[0], *four, expect={"add_layer_norm": 1})
    check(residual, random(2, 3, 8), random(8), random(8), random(8), expect={"layer_norm": 1})


def test_never_across_a_mutation():
    def fn(x, w, b):
        y = x * 1.0
        mean = y.mean(-1, keepdim=True)
        y.add_(1)
        return w * ((y - mean) * torch.rsqrt((y - mean).pow(2).mean(-1, keepdim=True) + EPS))

    check(fn, *(random(*shape, grad=False) for shape in ((4, 8), (8,), (8,))), expect={})


@pytest.mark.parametrize("spelling", [bare_in_fp32, in_fp32, cohere, shared])
def test_a_norm_that_is_computed_in_fp32_reads_x_itself(spelling):
    """The op widens by itself: a copy in fp32 would be saved for the backward."""
    args = random(2, 3, 8, dtype=torch.bfloat16), random(8, dtype=torch.bfloat16), random(8, dtype=torch.bfloat16)
    graph, _ = recognized(spelling, *args, expect={"layer_norm": 1}, tol=1.2e-2)
    (node,) = [node for node in graph.nodes if node.target is layer_norm.overload]
    assert node.args[0].op == "placeholder" and list(node.args[0].users) == [node]
    assert node.args[4] is torch.bfloat16  # as its template takes gradients


def in_fp64(x, w, b):
    return F.layer_norm(x.double(), x.shape[-1:], w.double(), b.double(), EPS).to(x.dtype)


def written_in_fp64(x, w, b):
    centred = x.double() - x.double().mean(-1, keepdim=True)
    return (w.double() * (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + EPS))).to(x.dtype)


@pytest.mark.parametrize("spelling", [in_fp64, written_in_fp64])
def test_a_norm_that_is_computed_in_fp64_reads_the_wide_copy(spelling):
    args = random(2, 3, 8), random(8), random(8)
    graph, _ = recognized(spelling, *args)
    for node in graph.nodes:
        assert node.target is not layer_norm.overload or node.args[0].target == "to"


def torchs_unrounded(x, w):
    return F.layer_norm(x.float(), x.shape[-1:], w.float(), None, EPS)


def shared_unrounded(x, w):
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + EPS) * w


@pytest.mark.parametrize("spelling", [torchs_unrounded, shared_unrounded])
def test_a_result_that_stays_in_fp32(spelling):
    """The op gives fp32 for x in bf16: rounded, it would be off by 2e-3. x itself is what it reads, and saves."""
    x, w = random(2, 3, 8, dtype=torch.bfloat16), random(8, dtype=torch.bfloat16)
    graph, _ = recognized(spelling, x, w, expect={"layer_norm": 1})
    (node,) = [node for node in graph.nodes if node.target is layer_norm.overload]
    assert node.args[0].op == "placeholder" and node.args[4] is torch.float32


def test_a_result_that_is_rounded_and_then_widened():
    """In fp32 at once it would be more exact than the model is."""
    args = (random(2, 3, 8, dtype=torch.bfloat16), *(random(8, dtype=torch.bfloat16) for _ in range(2)))

    def fn(x, w, b):
        return functional(x, w, b).float()

    graph, _ = recognized(fn, *args, expect={"layer_norm": 1}, tol=1.2e-2)
    (node,) = [node for node in graph.nodes if node.target is layer_norm.overload]
    assert node.args[4] is torch.bfloat16 and [user.target for user in node.users] == ["to"]


def moved(x, w, b):
    return F.layer_norm(x.to("cpu"), x.shape[-1:], w, b, EPS).to("cpu")


def test_a_move_to_a_device_is_no_cast():
    """The op would read x where it was, and leave its result there."""
    graph, _ = recognized(moved, random(2, 3, 8), random(8), random(8), expect={"layer_norm": 1})
    (node,) = [node for node in graph.nodes if node.target is layer_norm.overload]
    assert node.args[0].target == "to" and [user.target for user in node.users] == ["to"]


def test_a_weight_in_fp64_scales_in_fp64():
    """The op would round the weight first."""

    def fn(x, w):
        return shared_unrounded(x, w).to(x.dtype)

    for dtype, ops in ((torch.float64, {}), (torch.float32, {"layer_norm": 1})):
        recognized(fn, random(2, 3, 8), random(8, dtype=dtype), passes=family("layer_norm"), expect=ops)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_statistics_in_half_precision_stay(twice, rounded):
    """The op computes them in fp32."""

    def fn(x, w):
        return centred_norm(x, w, twice, rounded)

    for dtype, ops in ((torch.bfloat16, {}), (torch.float32, {"layer_norm": 1})):
        given = torch.randn(2, 3, 8).to(dtype).requires_grad_(), torch.randn(8).to(dtype).requires_grad_()
        recognized(fn, *given, expect=ops, tol=1.2e-2)


def roots(x, w, b):
    """None is of a variance, or its operands are told by name."""
    centred = x - x.mean(-1, keepdim=True)
    squares = torch.pow(centred, 2)
    others = [x.pow(2).mean(-1) + EPS, squares.mean(-1), squares + EPS, centred.mean(-1) + EPS, squares.mean(-1) - EPS]
    return *map(torch.rsqrt, others), torch.rsqrt(input=squares.mean(-1) + EPS), torch.sqrt(squares.mean(-1) + EPS)


@pytest.mark.parametrize("spelling, count", [(functional, 1), (cohere, 1), (shared, 1), (two_dims, 1), (roots, 0)])
def test_what_counts_as_a_norm(spelling, count):
    """The report tells of those that are found and not rewritten."""
    graph = torch.fx.symbolic_trace(spelling).graph
    found = anchors(graph)
    assert [node.op for node in found] == ["call_function"] * count
    assert all(node.target in (F.layer_norm, torch.rsqrt) for node in found)
