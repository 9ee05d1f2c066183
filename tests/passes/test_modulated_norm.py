"""Norms that rows of the batch scale and shift (adaLN), in the spellings of real models, near misses, and residual sums."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.support.autocast import norms_as_on_a_gpu
from tests.support.passes import traced
from tests.support.passes.run import check, family, random
from tunecompile.ops import add_modulated_norm, modulated_norm

PASSES = family("layer_norm", "rms_norm", "modulated_norm", "add_modulated_norm", "add_layer_norm", "add_rms_norm")
recognized = partial(traced.recognized, passes=PASSES)
ROWS, TOKENS, WIDTH, EPS = 2, 3, 8, 1e-3


def norm(x):
    return F.layer_norm(x, x.shape[-1:], None, None, EPS)


def flux(x, scale, shift):
    return norm(x) * (1 + scale[:, None]) + shift[:, None]


def dit(x, scale, shift):
    """As the first of them had it."""
    return norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def one_before_view(x, scale, shift):
    return shift[:, None] + norm(x) * (scale + 1.0)[:, None]


def wan(x, scale, shift):
    """Computed in fp32, and cast back."""
    return (norm(x.float()) * (1 + scale.float().unsqueeze(1)) + shift.float().unsqueeze(1)).type_as(x)


def ltx(x, scale, shift):
    """A norm of the root mean square."""
    return F.rms_norm(x, (x.shape[-1],), None, EPS) * (1 + scale[:, None]) + shift[:, None]


def written_out(x, scale, shift):
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return normed.to(x.dtype) * (1 + scale[:, None]) + shift[:, None]


def of_a_table(x, scale, shift):
    """All rows share them."""
    return norm(x) * (1 + scale[None, :1]) + shift[None, :1]


SPELLINGS = [flux, dit, one_before_view, wan, ltx, written_out, of_a_table]


def given(dtype=torch.float32):
    return random(ROWS, TOKENS, WIDTH, dtype=dtype), random(ROWS, WIDTH, dtype=dtype), random(ROWS, WIDTH, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_matches(spelling, dtype):
    tol = 1e-5 if dtype == torch.float32 else 1.6e-2
    graph, context = recognized(spelling, *given(dtype), expect={"modulated_norm": 1}, tol=tol, tidy=True)
    (node,) = graph.find_nodes(op="call_function", target=modulated_norm.overload)
    assert node.args[0].op == "placeholder" and node.args[6] == dtype
    assert node.args[4:6] == (float(spelling is not one_before_view), spelling not in (ltx, written_out))
    (tally,) = [each for each in context.tallies if each.family == "modulated_norm"]
    assert (tally.found, tally.rewritten, tally.refused) == (1, 1, [])


def test_tokens_are_a_symbol():
    check(flux, *given(), passes=PASSES, expect={"modulated_norm": 1}, rows=(1,))


def with_weight(x, scale, shift):
    return F.layer_norm(x, x.shape[-1:], scale[0], None, EPS) * (1 + scale[:, None]) + shift[:, None]


def by_token(x, scale, shift):
    """What each token has of its own is no sum over tokens."""
    return norm(x) * (1 + x.sin()) + shift[:, None]


def shifted_by_token(x, scale, shift):
    return norm(x) * (1 + scale[:, None]) + x


def by_column(x, scale, shift):
    return norm(x) * (1 + scale[:, None, :1]) + shift[:, None]


def norm_read_twice(x, scale, shift):
    made = norm(x)
    return made * (1 + scale[:, None]) + shift[:, None], made


@pytest.mark.parametrize("mutation", [with_weight, by_token, shifted_by_token, by_column, norm_read_twice])
def test_does_not_match(mutation):
    recognized(mutation, *given(), expect={"layer_norm": 1})


def subtracted(x, scale, shift):
    return norm(x) * (1 - scale[:, None]) + shift[:, None]


def test_another_factor_is_taken_as_it_is():
    graph, _ = recognized(subtracted, *given(), expect={"modulated_norm": 1})
    (node,) = graph.find_nodes(op="call_function", target=modulated_norm.overload)
    assert node.args[4] == 0.0


def test_scales_in_fp64_are_not_rounded():
    x, scale, shift = random(ROWS, TOKENS, WIDTH), *(random(ROWS, WIDTH, dtype=torch.float64) for _ in range(2))
    recognized(flux, x, scale, shift, expect={"layer_norm": 1})


def block(x, branch, gate, scale, shift):
    """Flux's: a gated branch is added, and the sum is normed and added to again."""
    total = x + gate[:, None] * branch
    return total + flux(total, scale, shift).sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residual(dtype):
    x, scale, shift = given(dtype)
    args = x, random(ROWS, TOKENS, WIDTH, dtype=dtype), random(ROWS, WIDTH, dtype=dtype), scale, shift
    check(block, *args, passes=PASSES, expect={"add_modulated_norm": 1}, tol=1e-5 if dtype == torch.float32 else 3e-2)


def test_a_sum_that_broadcasts_is_apart():
    args = random(1, TOKENS, WIDTH), random(ROWS, TOKENS, WIDTH), *(random(ROWS, WIDTH) for _ in range(3))
    graph, _ = recognized(block, *args, expect={"modulated_norm": 1})
    assert not graph.find_nodes(op="call_function", target=add_modulated_norm.overload)


def test_under_autocast():
    """A GPU's norm gives fp32, so that scale and shift widen: the op does so by itself, from x in half precision."""

    def fn(x, scale, shift, weight):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(flux(x, scale, shift), weight)

    args = *given(torch.bfloat16), random(WIDTH, WIDTH, dtype=torch.bfloat16)
    with norms_as_on_a_gpu():
        seen = check(fn, *args, passes=PASSES, expect={"modulated_norm": 1}, tol=1.6e-2)
    (node,) = seen.graphs[0].find_nodes(op="call_function", target=modulated_norm.overload)
    assert node.args[0].op == "placeholder" and node.args[6] == torch.float32
