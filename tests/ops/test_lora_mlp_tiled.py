"""The MLP in pieces is the MLP: as close to fp64, for every number of pieces."""

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.support.ops.arguments import APART, JOINT, dense_mlp, mlp_leaves, packed_mlp
from tests.support.ops.checks import assert_fake_is_real, error, wide
from tunecompile.ops import lora_mlp, lora_mlp_tiled
from tunecompile.ops.lora_mlp_tiled import pieces

TILES = [1, 2, 4, 16]  # of six tokens: more than there are, too


def results(op, arguments, *more):
    y = op(*arguments, *more)
    y = y if more else y[0]
    torch.manual_seed(5)
    return [y, *torch.autograd.grad(y, mlp_leaves(arguments), torch.randn(y.shape).to(y.dtype))]


@pytest.mark.parametrize(
    "tokens, tiles, sizes",
    [(8, 4, [2] * 4), (9, 4, [2, 2, 2, 3]), (7, 4, [7]), (3, 4, [3]), (0, 2, [0]), (5, 1, [5])],
)
def test_pieces_hold_every_token_once(tokens, tiles, sizes):
    cut = pieces(tokens, tiles)
    assert [piece.stop - piece.start for piece in cut] == sizes
    assert torch.equal(torch.cat([torch.arange(tokens)[piece] for piece in cut]), torch.arange(tokens))


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize(
    "dtype, adapted",
    [(torch.float32, None), (torch.bfloat16, torch.float32), (torch.bfloat16, None), (torch.float16, None)],
)
def test_as_exact_as_the_whole(dtype, adapted, tiles):
    arguments = dense_mlp(dtype, "silu", adapted)
    exact = [
        tree_map(lambda v: v.detach().requires_grad_() if isinstance(v, torch.Tensor) else v, part)
        if i in (0, 2, 3)
        else part
        for i, part in enumerate(wide(arguments))
    ]
    for best, whole, mine in zip(
        results(lora_mlp, exact), results(lora_mlp, arguments), results(lora_mlp_tiled, arguments, tiles)
    ):
        assert (whole.shape, whole.dtype) == (mine.shape, mine.dtype)
        assert error(mine, best) <= 2 * max(error(whole, best), torch.finfo(whole.dtype).eps / 2)


@pytest.mark.parametrize("double", [True, False])
def test_over_packed_weights(double):
    arguments, _ = packed_mlp(double, shapes=JOINT if double else APART)
    for whole, mine in zip(results(lora_mlp, arguments), results(lora_mlp_tiled, arguments, 4)):
        assert error(mine, whole) < 1e-6


def test_gradcheck():
    arguments = dense_mlp(torch.float64)
    run = lambda x, *m: lora_mlp_tiled(x, arguments[1], m[:3], m[3:], *arguments[4:], 4)  # noqa: E731
    assert torch.autograd.gradcheck(run, mlp_leaves(arguments), fast_mode=True)


def test_fake_and_schema():
    for arguments in (dense_mlp(), packed_mlp(True)[0]):
        detached = tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, arguments)
        assert_fake_is_real(lora_mlp_tiled, *detached, 4)
        assert_fake_is_real(lora_mlp_tiled.backward_op, torch.randn_like(lora_mlp_tiled(*detached, 4)), *detached, 4)
    torch.library.opcheck(lora_mlp_tiled.overload, (*dense_mlp(), 4))


def test_a_tiled_form_takes_what_the_op_takes():
    assert lora_mlp.tiled is lora_mlp_tiled and lora_mlp_tiled.parameters == (*lora_mlp.parameters, "tiles")
