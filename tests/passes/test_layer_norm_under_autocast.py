"""LayerNorm under autocast, which on a GPU gives fp32 for x in half precision: as a Trainer with bf16=True runs it."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from tests.support.autocast import norms_as_on_a_gpu
from tests.support.passes import run
from tests.support.passes.norms import centred_norm
from tests.support.passes.run import family, random
from tunecompile.compiler.backend import Backend
from tunecompile.ops import add_layer_norm, layer_norm
from tunecompile.passes import PIPELINE

PASSES = family("layer_norm", "add_layer_norm")
check = partial(run.check, passes=PASSES)
BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-3
TOL = 1.2e-2


@pytest.fixture(autouse=True)
def as_on_a_gpu():
    with norms_as_on_a_gpu():
        yield


def norm(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b, EPS)


def given(weights=BF16, x=BF16, trained=True):
    """x, the norm's weight and bias, and a linear's weight, at the scale that networks have."""
    torch.manual_seed(0)
    shapes = (2, 3, 32), (32,), (32,), (32, 32)
    made = random(*shapes[0], dtype=x), *(random(*each, dtype=weights, grad=trained) for each in shapes[1:])
    return [*made[:3], (made[3].detach() * 32**-0.5).requires_grad_(trained)]


def linear_alone(x, w, b, m):
    """A tower's block, or GPT-2's: one linear reads the norm, and casts it by itself."""
    return x + F.linear(norm(x, w, b), m)


def siblings(x, w, b, m):
    normed = norm(x, w, b)
    return F.linear(normed, m) * F.linear(normed, m.t())


def cast_alone(x, w, b, m):
    """As where the linear has adapters, whose op gets a cast of its own."""
    return x + F.linear(norm(x, w, b).to(BF16), m)


def view_between(x, w, b, m):
    """Qwen3-VL's merger."""
    return F.linear(norm(x, w, b).view(-1, x.shape[-1]), m)


def behind_the_sum(x, w, b, m):
    """BERT: the norm's result is the next residual, in fp32."""
    normed = norm(x, w, b)
    return normed + F.linear(normed, m)


def cast_and_sum(x, w, b, m):
    normed = norm(x, w, b)
    return normed + F.linear(normed.to(BF16), m)


def wide_by_itself(x, w, b, m):
    """The copy of x in fp32 is not what is saved."""
    return F.linear(norm(x.float(), w, b), m)


CASES = {
    linear_alone: FP32,
    siblings: FP32,
    cast_alone: BF16,
    view_between: FP32,
    behind_the_sum: FP32,
    cast_and_sum: FP32,
    wide_by_itself: FP32,
}


def seen(fn, *args, **options):
    """What the passes made of a function under autocast."""
    with torch.autocast("cpu", BF16):
        return check(fn, *args, tol=TOL, **options)


@pytest.mark.parametrize("weights", [BF16, FP32], ids=str)
@pytest.mark.parametrize("fn", CASES)
def test_matches_and_gives_what_is_read(fn, weights):
    """Given bf16 where a residual reads fp32, the op would round what eager does not."""
    found = seen(fn, *given(weights), expect={"layer_norm": 1})
    (node,) = [each for each in found.graphs[0].nodes if each.target is layer_norm.overload]
    assert node.args[4] is CASES[fn] and node.meta["example_value"].dtype is CASES[fn]
    assert node.args[0].op == "placeholder" and node.args[0].meta["example_value"].dtype is BF16
    assert not found.refused


@pytest.mark.parametrize("fn, dtype", [(linear_alone, FP32), (cast_alone, BF16)])
def test_a_residual_sum_before_it(fn, dtype):
    x, w, b, m = given()
    found = seen(lambda x, r, *rest: fn(x + r, *rest), x, random(2, 3, 32, dtype=BF16), w, b, m, whole=False)
    assert found.ops == {"add_layer_norm": 1}
    (node,) = [each for each in found.graphs[0].nodes if each.target is add_layer_norm.overload]
    assert [made.dtype for made in node.meta["example_value"]] == [dtype, BF16]


def test_values_in_fp32_are_not_rounded():
    """Rounded to bf16 and widened again, they would be off by 2e-3."""
    x, w, b, _ = given()
    with torch.autocast("cpu", BF16):
        check(norm, x, w, b, expect={"layer_norm": 1}, tol=1e-6)


@pytest.mark.parametrize("narrow", [torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rounded", [False, True])
def test_x_that_is_rounded_before_is_not_read_unrounded(narrow, rounded):
    """Large values are infinite in fp16; the op must not read x itself."""

    def fn(x, w, b):
        made = norm(x.to(narrow), w, b)
        return made.to(BF16) if rounded else made

    x, w, b, _ = given(trained=False)
    with torch.autocast("cpu", BF16):
        found = check(fn, x.detach(), w, b, tol=1e-6, whole=False)
    nodes = [each for each in found.graphs[0].nodes if each.target is layer_norm.overload]
    assert all(each.args[0].target == "to" for each in nodes)


def test_whole_numbers_are_read_as_they_are_cast():
    with torch.autocast("cpu", BF16):
        found = check(lambda n, w, b: norm(n.to(FP32), w, b), torch.randint(9, (2, 8)), random(8), random(8))
    (node,) = [each for each in found.graphs[0].nodes if each.target is layer_norm.overload]
    assert node.args[0].target == "to"


def test_a_cast_in_another_dtype_stays():
    """fp32 x, and its norm in bf16: two roundings of one value are kept apart from those of x."""
    x, w, b, m = given(FP32, x=FP32)
    found = seen(cast_alone, x, w, b, m, expect={"layer_norm": 1})
    (node,) = [each for each in found.graphs[0].nodes if each.target is layer_norm.overload]
    assert node.args[4] is FP32 and [user.target for user in node.users] == ["to"]


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_a_mean_in_half_precision_stays(twice, rounded):
    """Powers and all behind them are in fp32; the mean, and what it is taken off, are rounded."""

    def fn(x, w):
        return centred_norm(x, w, twice, rounded)

    for dtype, ops in ((BF16, {}), (FP32, {"layer_norm": 1})):
        found = seen(fn, random(2, 3, 8, dtype=dtype), random(8, dtype=dtype), whole=False)
        assert found.ops == ops and (ops or "computed in torch.bfloat16" in str(found.refused))


def gradients(fn, args, run):
    """Of what is trained, by a loss in which every element has its own weight."""
    leaves = [each.detach().clone().requires_grad_(each.requires_grad) for each in args]
    out = run(fn)(*leaves)
    loss = (out.double() * torch.cos(torch.arange(out.numel(), dtype=torch.float64)).reshape(out.shape)).sum()
    return [out.detach(), *torch.autograd.grad(loss, [each for each in leaves if each.requires_grad])]


def under_autocast(fn):
    def run(*args):
        with torch.autocast("cpu", BF16):
            return fn(*args)

    return run


def distance(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("weights", [BF16, FP32], ids=str)
@pytest.mark.parametrize("fn", [linear_alone, cast_alone, behind_the_sum])
def test_no_further_from_fp64_than_eager(fn, weights, trained):
    """x, weight and bias of the norm, through all passes, AOTAutograd and lowering."""
    args = given(weights, trained=trained)
    exact = gradients(fn if fn is not cast_alone else linear_alone, [each.double() for each in args], lambda fn: fn)
    torch._dynamo.reset()
    backend = Backend("test", PIPELINE, "eager")
    ours = gradients(fn, args, lambda fn: under_autocast(torch.compile(fn, backend=backend)))
    theirs = gradients(fn, args, under_autocast)
    assert not backend.failures and len(ours) == (5 if trained else 2)
    for got, eager, wanted in zip(ours, theirs, exact, strict=True):
        assert got.dtype == eager.dtype
        assert distance(got, wanted) <= 1.02 * distance(eager, wanted) + 1e-7


@pytest.mark.parametrize("fn", [linear_alone, cast_alone, siblings, wide_by_itself])
def test_no_copy_in_fp32_is_saved(fn):
    """x as it came, parameters, and what the linears read."""
    args, kept = given(), []
    torch._dynamo.reset()
    compiled = under_autocast(torch.compile(fn, backend=Backend("test", PIPELINE, "eager")))
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        compiled(*args).sum().backward()
    assert kept and not [each for each in kept if each.dtype is FP32 and each.numel() >= args[0].numel()]
    assert not [each for each in kept if each.numel() == args[0].numel() // args[0].shape[-1]]  # statistics of rows


@pytest.mark.parametrize("weights", [BF16, FP32], ids=str)
@pytest.mark.parametrize("x", [BF16, torch.float16, FP32], ids=str)
def test_dtypes_are_those_of_a_gpu(x, weights):
    """What these tests stand on."""

    def made(device):
        rows, parameter = torch.empty(2, 8, dtype=x, device=device), torch.empty(8, dtype=weights, device=device)
        before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        try:
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, BF16)
            return norm(rows, parameter, parameter).dtype, rows.pow(2).dtype, F.linear(rows, rows).dtype
        finally:
            torch.set_autocast_enabled(device, before[0])
            torch.set_autocast_dtype(device, before[1])

    with FakeTensorMode(), torch.no_grad():
        assert made("cuda") == made("cpu") == (FP32, FP32, BF16)
