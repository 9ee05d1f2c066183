"""`lora_mlp`, computed tile by tile over the tokens, so that wide tensors have the size of one tile.

In a long batch gate|up, its gradient and the activation need most of the memory of a layer: 1.36 GiB for 8,192 tokens
of an 8B model, where the hidden states between layers need 64 MiB. Only x is saved; the backward recomputes each
tile's gate|up. Weights are dequantised once for all tiles. (As Arctic's TiledMLP: Bekman et al., 2025,
arXiv:2506.13996.)"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile.ir.op import Cost, op
from tunecompile.ops import lora
from tunecompile.ops.adapters.layout import below, on_diagonal
from tunecompile.ops.frozen_weights import DENSE
from tunecompile.ops.lora_mlp import (
    DOWN,
    WIDE,
    _refuse,
    forward_flops,
    frozen_of,
    inner_width,
    lora_mlp,
    lora_mlp_backward,
    of_projections,
)
from tunecompile.ops.norms.rms_norm import compute_dtype

__all__ = ["lora_mlp_tiled", "lora_mlp_tiled_backward", "pieces"]


def backward_flops(grad, x, *rest) -> int:
    """Count gate and up once more, and the gradients of all three products."""
    return forward_flops(x, *rest) * 5 // 3


def pieces(tokens: int, tiles: int) -> list[slice]:
    """Return the slices of `tokens` rows that make up the tiles.

    There are `tiles` of them. All have equal length, except that the last one also has the remainder. There is one
    if a tile would have fewer than two tokens: torch asks of each size whether it is 1, and would compile once more.
    """
    tiles = tiles if tokens >= 2 * tiles else 1
    each = tokens // tiles
    return [slice(i * each, (i + 1) * each) for i in range(tiles - 1)] + [slice((tiles - 1) * each, tokens)]


def _dense(x, weights, a, b, scales, stored, activation) -> tuple:
    """The arguments of `lora_mlp` behind x, with dequantised weights."""
    wide, down = frozen_of(x, weights, b, stored)
    return [*wide.members(), *down.members()], a, b, scales, DENSE, activation


@op(cost=Cost.MATMUL, flops=forward_flops, takes=lora_mlp, example=lambda draw: [*lora_mlp.example(draw), 2])
def lora_mlp_tiled(*, x, tiles: int, **rest) -> Tensor:
    """Return the y of `lora_mlp`, computed tile by tile over the tokens (arXiv:2506.13996).

    Args:
        x: [..., K], any floating dtype. This and all arguments but the last: as for
            `tunecompile.ops.lora_mlp.lora_mlp`.
        tiles: their number, see `pieces`.

    Returns:
        [..., K'] in x's dtype.
    """
    tokens = x.reshape(-1, x.shape[-1])
    dense = _dense(x, **rest)
    y = torch.cat([lora_mlp.reference(tokens[piece], *dense)[0] for piece in pieces(tokens.shape[0], tiles)])
    return y.reshape(*x.shape[:-1], y.shape[-1])


@lora_mlp_tiled.provider(
    "joined",
    because="wide tensors exist for one tile of the tokens at a time",
    refuses=_refuse,
)
def _(x, weights, a, b, scales, stored, activation, tiles):
    """All tiles share one buffer for each product's operand, so a tile begins only after the tile before it is done."""
    (gate_and_up, down), inner = frozen_of(x, weights, b, stored), inner_width(b)
    tokens, xa = x.reshape(-1, x.shape[-1]), lora.down(x, [], a[WIDE], x.dtype)
    wide = gate_and_up.written(b[WIDE], scales[WIDE], x.dtype)
    narrow = down.written(b[DOWN], scales[DOWN], x.dtype)
    a_down = a[-1].to(x.dtype).t()
    cut = pieces(tokens.shape[0], tiles)
    beside, act = _room(x, cut, wide.shape[1]), _room(x, cut, narrow.shape[1])
    y = _room(x, [slice(0, tokens.shape[0])], down.height)
    for piece in cut:
        count = piece.stop - piece.start
        templates.lora.write_beside(tokens[piece], xa[piece], beside)
        templates.swiglu.forward(*(beside[:count] @ wide.t()).split(inner, 1), activation, out=act)
        templates.lora.append_columns(act[:count, :inner] @ a_down, act, inner)
        templates.lora.append_rows(act[:count] @ narrow.t(), y, piece.start)
    return y.reshape(*x.shape[:-1], down.height)


def _room(like: Tensor, cut: Sequence[slice], width: int) -> Tensor:
    """A buffer for the rows of the largest tile, which is the last."""
    return torch.empty((cut[-1].stop - cut[-1].start, width), dtype=like.dtype, device=like.device)


@lora_mlp_tiled.backward(gives=("x", "a", "b"), flops=backward_flops)
def lora_mlp_tiled_backward(*, grad, x, a, b, tiles, **rest) -> list[Tensor]:
    """Return the gradients of `lora_mlp_tiled`; each tile's gate|up is recomputed.

    The adapters' gradients are summed over tiles in fp32 or wider.

    Args:
        grad: of y, [..., K'] in its dtype. The others are those of `lora_mlp_tiled`.

    Returns:
        [dx, dA of each projection, dB of the same], each with the shape and dtype of its input.
    """
    tokens, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    dense = _dense(x, a=a, b=b, **rest)
    dx, total = [], [torch.zeros(m.shape, dtype=compute_dtype(x.dtype), device=x.device) for m in (*a, *b)]
    for piece in pieces(tokens.shape[0], tiles):
        args = (tokens[piece], *dense)
        first, *adapters = lora_mlp_backward.reference(grads[piece], *args, *lora_mlp.reference(*args)[1:])
        dx.append(first)
        total = [t + d for t, d in zip(total, adapters)]
    return [torch.cat(dx).reshape(x.shape), *(t.to(m.dtype, copy=True) for t, m in zip(total, (*a, *b)))]


@lora_mlp_tiled_backward.provider(
    "joined",
    because="gate|up once more, tile by tile; the adapters' sums are added up in the pass that makes the gradients",
    refuses=_refuse,
)
def _(grad, x, weights, a, b, scales, stored, activation, tiles):
    """The adapters' inner products are narrow: they are stored for all tokens, and each gradient is one product."""
    (gate_and_up, down), inner, columns = frozen_of(x, weights, b, stored), inner_width(b), x.shape[-1]
    tokens, grads, ranks = x.reshape(-1, columns), grad.reshape(-1, grad.shape[-1]), [m.shape[0] for m in a]
    through_wide, through_down = (on_diagonal(b[part], scales[part], x.dtype) for part in (WIDE, DOWN))
    xa, gb = lora.down(x, [], a[WIDE], x.dtype), grads @ through_down
    # [[W, scale B], [A, anything]], for both directions
    wide = gate_and_up.written(b[WIDE], scales[WIDE], x.dtype, below(a[WIDE], 2 * inner, x.dtype))
    narrow, a_down = down.stacked(a[DOWN], x.dtype), a[-1].to(x.dtype).t()
    cut = pieces(tokens.shape[0], tiles)
    left, right = _room(x, cut, wide.shape[1]), _room(x, cut, narrow.shape[0])
    dx = _room(x, [slice(0, tokens.shape[0])], columns)
    parts = templates.lora_mlp.begin(left.shape[0], inner, ranks[WIDE], gb)
    xa_down, gb_wide = [], []
    for piece in cut:
        count = piece.stop - piece.start
        templates.lora.write_beside(tokens[piece], xa[piece], left)
        # the last columns are overwritten below; if zeroed here, Inductor would compute all tiles' products at once
        both = left[:count] @ wide.t()
        gate_up = both[:, : 2 * inner]
        xa_down.append(templates.swiglu.forward(*gate_up.split(inner, 1), activation) @ a_down)
        templates.lora.write_beside(grads[piece], gb[piece], right)
        templates.lora_mlp.backward_of_piece(
            right[:count] @ narrow, gate_up, gb[piece], xa[piece], ranks[WIDE], activation, parts, both
        )
        gb_wide.append(both[:, : 2 * inner] @ through_wide)
        templates.lora.append_columns(gb_wide[-1], both, 2 * inner)
        templates.lora.append_rows(both @ wide[:, :columns], dx, piece.start)
    *db_wide, da_down = templates.lora_mlp.sums(parts, ranks[WIDE], ranks[-1])
    d_a = (*(torch.cat(gb_wide).t() @ tokens).split(ranks[WIDE]), da_down)
    d_b = [d * scale for d, scale in zip((*of_projections(db_wide, b), grads.t() @ torch.cat(xa_down)), scales)]
    return [dx.reshape(x.shape), *(d.to(m.dtype) for d, m in zip(d_a, a)), *(d.to(m.dtype) for d, m in zip(d_b, b))]


lora_mlp.tiled = lora_mlp_tiled
