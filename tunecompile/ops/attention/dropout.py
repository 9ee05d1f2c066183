"""Attention inside concatenated sequences whose weights have dropout, as encoders train: BERT, XLM-R, BGE-M3.

A seed, drawn in the graph, says which weights are kept, by a word of a counter-based generator for each of them
(Philox-4x32: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011). So the backward keeps the same ones.
"""

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile.ir.op import Cost, op
from tunecompile.ir.shape_rule_cache import contiguous_like
from tunecompile.ops.attention.documents import Places, attention_shapes, refuse_template, sums_of_gradients

ROUNDS = 7  #: of Philox, with which it passes all tests of randomness (its paper, table 2)
WORD = 0xFFFFFFFF


def _philox(seed: Tensor, first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, ...]:
    """Four random words of 32 bits for each counter. All are int64, of shapes that broadcast."""
    a, b, c, d = first, second, third, torch.zeros_like(second)
    low, high = seed & WORD, seed >> 32
    for _ in range(ROUNDS):
        left, right = 0xCD9E8D57 * c, 0xD2511F53 * a
        a, b = ((left >> 32) ^ b ^ low) & WORD, left & WORD
        c, d = ((right >> 32) ^ d ^ high) & WORD, right & WORD
        low, high = (low + 0x9E3779B9) & WORD, (high + 0xBB67AE85) & WORD
    return a, b, c, d


def _factors(places: Places, heads: int, dropout: float, seed: Tensor) -> Tensor:
    """[S, heads, L, L]: 1 / (1 - dropout) for each weight that is kept, 0 for the others.

    A counter is (the query's token in the row, the key's place by 4, the head), and has words for four keys.
    """
    length = places.index.shape[1]
    place = torch.arange(-(-length // 4), device=seed.device)
    head = torch.arange(heads, device=seed.device)[:, None, None]
    words = torch.stack(_philox(seed, places.index[:, None, :, None], place, head), -1).flatten(-2)[..., :length]
    return (words >= min(round(dropout * 2**32), WORD)).to(torch.float32) / (1 - dropout)


def _backward_shapes(grad, q, k, v, *_) -> list[Tensor]:
    return contiguous_like(q, k, v)


def _example(draw) -> list:
    """Two images, and two heads that share a key."""
    q, k, v = (draw.normal(70, heads, 64) for heads in (2, 1, 1))
    return [q, k, v, draw.numbers(0, 33, 70), 37, 0.125, 0, False, 0.25, draw.numbers(5).long()]


@op(cost=Cost.MATMUL, opaque=True, shapes=attention_shapes, example=_example)
def dropout_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    longest: int,
    scale: float,
    window: int,
    causal: bool,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """dropout(softmax(scale q k^T)) v, where each token attends to its sequence, or to itself and earlier tokens of it.

    Args:
        q, k, v, offsets, longest, scale, window, causal: as for `varlen_attention`.
        dropout: the share of weights that is dropped, 0 <= dropout < 1; others are divided by 1 - dropout.
        seed: int64 [1], not negative: which ones are dropped.

    Returns:
        (out, logsumexp): out as q, contiguous; the logsumexp of scores, [H, N] in the dtype of the arithmetic, which
        gets no gradient."""
    places = Places(offsets, longest, q.shape[0], causal)
    factors = _factors(places, q.shape[1], dropout, seed)
    return places.attend(q, k, v, scale, window, 0.0, factors=factors)


@dropout_attention.backward(gives=("q", "k", "v"), opaque=True, shapes=_backward_shapes)
def dropout_attention_backward(
    grad, q, k, v, offsets, longest, scale, window, causal, dropout, seed, out0, out1
) -> list[Tensor]:
    """Return the gradients of `dropout_attention`; weights are recomputed from the logsumexp (arXiv:2205.14135).

    Args:
        grad: of out, [N, H, D] in its dtype.
        out0: out, as `dropout_attention` returned it.
        out1: the logsumexp of scores, [H, N]. The others are those of `dropout_attention`.

    Returns:
        [dq, dk, dv], contiguous, in shape and dtype of q, k and v.
    """
    places = Places(offsets, longest, q.shape[0], causal)
    drawn_again = _factors(places, q.shape[1], dropout, seed)
    return places.gradients(grad, out1, q, k, v, scale, window, 0.0, drawn_again)


_TEMPLATE = "weights are dropped in registers, by the same words in both passes"


@dropout_attention.provider("triton", because=_TEMPLATE, refuses=refuse_template)
def _(q, k, v, offsets, longest, scale, window, causal, dropout, seed):
    return templates.attention.forward(q, k, v, offsets, longest, scale, window, causal=causal, dropped=(dropout, seed))


@dropout_attention_backward.provider("triton", because=_TEMPLATE, refuses=refuse_template)
def _(grad, q, k, v, offsets, longest, scale, window, causal, dropout, seed, out0, out1):
    rest = (out1, sums_of_gradients(grad, out0), offsets, longest, scale, window)
    return [*templates.attention.backward(grad, q, k, v, *rest, causal=causal, dropped=(dropout, seed))]
