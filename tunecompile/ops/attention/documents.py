"""Attention inside concatenated sequences, without padding (FlashAttention: Dao et al., arXiv:2205.14135).

Documents are causal; images, of whose patches a tower has one row, are not."""

from typing import Any, Optional

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile._torch.card import AMPERE, older_than
from tunecompile.ir.op import Cost, op, refuse_gpu, refuse_spills
from tunecompile.ir.shape_rule_cache import contiguous_like
from tunecompile.notes import Note, note


def _mask_shapes(offsets: Tensor, longest: int, total: int, *_: Any) -> Tensor:
    return offsets.new_empty(1, 1, total, total, dtype=torch.bool)


@op(cost=Cost.POINTWISE, shapes=_mask_shapes)
def document_mask(
    offsets: Tensor,
    longest: int,
    total: int,
    window: int,
    causal: bool = True,
    tree: Optional[Tensor] = None,
    places: Optional[Tensor] = None,
) -> Tensor:
    """The mask of attention within documents: a token sees itself and the earlier tokens of its document, or all of it.

    Attention under it is `varlen_attention`, or `branch_attention` where there is a tree: these read offsets and make
    no mask.

    Args:
        offsets: int32 [S + 1], rising from 0 to N: where each document begins.
        longest: tokens of the longest document, or more: kernels are launched for so many.
        total: N.
        window: how many tokens a token sees, itself included, and as many behind it if it sees these; 0 for all.
        causal: whether a token sees no later token.
        tree, places: of documents that go on where others end, as for `branch_attention`; causal.

    Returns:
        bool [1, 1, N, N], True where the query of the third dimension sees the key of the fourth."""
    place = torch.arange(total, device=offsets.device)
    document = torch.searchsorted(offsets[1:].long(), place, right=True)
    seen = document[:, None] == document
    back = place[:, None] - place
    if not causal:
        return (seen & (back.abs() < window) if window else seen)[None, None]
    if tree is not None and places is not None:
        seen = place[:, None] < tree[1][document]
        back = torch.where(back < 0, back, places[:, None] - places)
    seen = seen & (back >= 0)
    return (seen & (back < window) if window else seen)[None, None]


def attention_shapes(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Empty tensors like the results: the op's own code takes long to run on sizes that are symbols."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=wide)


def _backward_shapes(grad, q, k, v, offsets, longest, scale, window, sinks, *_: Any) -> list[Tensor]:
    return [*contiguous_like(q, k, v), grad.new_empty(0 if sinks is None else sinks.shape)]


def _example(draw) -> list:
    """Two documents, and two heads that share a key."""
    q, k, v = (draw.normal(70, heads, 64) for heads in (2, 1, 1))
    return [q, k, v, draw.numbers(0, 33, 70), 37, 0.125, 0, None, True, 30.0]


@op(cost=Cost.MATMUL, opaque=True, shapes=attention_shapes, example=_example)
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    longest: int,
    scale: float,
    window: int,
    sinks: Optional[Tensor],
    causal: bool,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v, where each token attends to itself and earlier tokens of its sequence.

    Without `causal` it attends to all of its own sequence. (It is opaque, so that on a CPU it is one call. Written out,
    it is a long graph of which nothing is fused, and most of the time to compile a layer.)

    Vendors' kernels for it are based on FlashAttention (arXiv:2205.14135). A sink is one more score in the softmax,
    without a value. With lse of the scores alone, sinks multiply the result by exp(lse - logaddexp(lse, sink)). The
    backward is that of attention without sinks, given the logarithm that includes them.

    Args:
        q: queries of all N tokens, [N, H, D], any floating dtype. Arithmetic is in fp32, in fp64 for fp64.
        k: keys, [N, K, D], where the number of heads K divides H: each is shared by H / K heads of q.
        v: values, [N, K, D].
        offsets: int32 [S + 1], rising from 0 to N; sequence i is tokens offsets[i] to offsets[i + 1], and may be empty.
        longest: tokens of the longest sequence, or more.
        scale: of the scores, mostly 1 / sqrt(D).
        window: how many tokens a token sees, itself included, and as many behind it if it sees these; 0 for all.
        sinks: [H], any floating dtype, or None.
        causal: whether a token sees no later token.
        softcap: c of c tanh(score / c), in the units of the scores (Gemma 2, arXiv:2408.00118); 0 for none.

    Returns:
        (out, logsumexp): out as q, contiguous; the logsumexp of scores and sink, [H, N] in the dtype of the arithmetic,
        which gets no gradient."""
    return Places(offsets, longest, q.shape[0], causal).attend(q, k, v, scale, window, softcap, sinks=sinks)


@varlen_attention.backward(gives=("q", "k", "v", "sinks"), opaque=True, shapes=_backward_shapes)
def varlen_attention_backward(
    grad, q, k, v, offsets, longest, scale, window, sinks, causal, softcap, out0, out1
) -> list[Tensor]:
    """Return the gradients of `varlen_attention`; probabilities are recomputed from the logsumexp (arXiv:2205.14135).

    Args:
        grad: of out, [N, H, D] in its dtype.
        out0: out, as `varlen_attention` returned it.
        out1: the logsumexp of scores and sink, [H, N]. The others are those of `varlen_attention`.

    Returns:
        [dq, dk, dv, dsinks], contiguous, in shape and dtype of q, k, v and sinks; dsinks is empty without sinks.
    """
    places = Places(offsets, longest, q.shape[0], causal)
    made = places.gradients(grad, out1, q, k, v, scale, window, softcap)
    return [*made, sinks_gradient(grad, out0, out1, sinks)]


def sinks_gradient(grad: Tensor, out: Tensor, logsumexp: Tensor, sinks: Tensor | None) -> Tensor:
    """- sum of exp(sink - logsumexp) <grad, out> over tokens: a sink has a share of the softmax but no value."""
    if sinks is None:
        return grad.new_zeros(0)
    wide = logsumexp.dtype
    shares = (sinks.to(wide)[:, None] - logsumexp).exp()
    return -(shares * (grad.to(wide) * out.to(wide)).sum(-1).t()).sum(1).to(sinks.dtype)


class Places:
    """The tokens as rows of equal length, [S, longest]. Places beyond the end of a sequence repeat some token.

    The causal mask alone excludes them, since they come last. Without it, such a place sees only itself."""

    def __init__(self, offsets: Tensor, longest: int, total: int, causal: bool):
        begin, end = offsets[:-1].long(), offsets[1:].long()
        place = torch.arange(longest, device=offsets.device)
        token = torch.arange(total, device=offsets.device)
        self.index = (begin[:, None] + place).clamp(max=total - 1)  # [S, L]: the token at each place
        self.taken = place < (end - begin)[:, None]  # [S, L]: whether the place is used
        self.sequence = torch.searchsorted(end, token, right=True)  # [N]: the sequence of each token
        self.place = token - begin[self.sequence]
        self.distance = place[:, None] - place  # [L, L]
        self.causal = causal

    def heads_first(self, x: Tensor, heads: int) -> Tensor:
        """[N, K, D] -> [S, heads, L, D] in the dtype of the arithmetic; shared keys are repeated for each head."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide.repeat_interleave(heads // x.shape[1], 1)[self.index].transpose(1, 2)

    def scores(self, q: Tensor, k: Tensor, scale: float, window: int, softcap: float) -> tuple[Tensor, Tensor | float]:
        """[S, H, L, L], minus infinity where a query does not see a key; and their slope by what the cap is of."""
        heads = q.shape[1]
        seen = self.distance >= 0 if self.causal else (self.taken[:, None] | (self.distance == 0))[:, None]
        if window:
            seen = seen & (self.distance.abs() < window)
        made = self.heads_first(q, heads) @ self.heads_first(k, heads).transpose(-1, -2) * scale
        slope: Tensor | float = 1.0
        if softcap:
            bent = torch.tanh(made / softcap)
            made, slope = softcap * bent, 1 - bent * bent
        return made.masked_fill(~seen, float("-inf")), slope

    def attend(
        self, q, k, v, scale, window, softcap, *, sinks: Tensor | None = None, factors: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the ops return. factors: [S, H, L, L], what weights are multiplied by before they weigh values."""
        scores, _ = self.scores(q, k, scale, window, softcap)
        logsumexp = scores.logsumexp(-1)
        if sinks is not None:
            logsumexp = torch.logaddexp(logsumexp, sinks.to(logsumexp.dtype)[:, None])
        weights = (scores - logsumexp[..., None]).exp()
        out = (weights if factors is None else weights * factors) @ self.heads_first(v, q.shape[1])
        return self.tokens(out).to(q.dtype), self.tokens(logsumexp[..., None])[..., 0].t().contiguous()

    def gradients(
        self, grad, logsumexp, q, k, v, scale, window, softcap, factors: Tensor | None = None
    ) -> list[Tensor]:
        """[dq, dk, dv] of `attend`, by its logsumexp."""
        heads, taken = q.shape[1], self.taken[:, None, :, None]
        scores, slope = self.scores(q, k, scale, window, softcap)
        relative = scores - self.heads_first(logsumexp.t()[..., None], heads)
        weights = relative.masked_fill(~taken, float("-inf")).exp()  # an unused place holds another token's logsumexp
        dout = self.heads_first(grad, heads) * taken  # a place without a token has no gradient
        change, kept = dout @ self.heads_first(v, heads).transpose(-1, -2), weights
        if factors is not None:
            change, kept = change * factors, weights * factors
        dscores = weights * (change - (weights * change).sum(-1, keepdim=True)) * slope * scale
        dq = dscores @ self.heads_first(k, heads)
        dk, dv = dscores.transpose(-1, -2) @ self.heads_first(q, heads), kept.transpose(-1, -2) @ dout
        return [
            self.tokens(dq).to(q.dtype),
            self.tokens(dk, k.shape[1]).to(k.dtype),
            self.tokens(dv, v.shape[1]).to(v.dtype),
        ]

    def tokens(self, rows: Tensor, heads: int | None = None) -> Tensor:
        """[S, H, L, D] -> [N, heads, D]: the inverse of `heads_first`; heads that share a key are summed."""
        flat = rows.transpose(1, 2)[self.sequence, self.place]
        return flat if heads is None else flat.reshape(flat.shape[0], heads, -1, flat.shape[-1]).sum(2)


_FLASH = "reads sequences in place, and shared keys once"
_TEMPLATE = "takes soft-capped scores and heads wider than 256; scores stay in registers"


def refuse_attention(q: Tensor, k: Tensor, v: Tensor, triton: bool) -> Note | None:
    """Return why no GPU kernel takes these, whatever their widths; None where one may. triton: as for `refuse_gpu`."""
    if reason := refuse_gpu(q, k, v, triton=triton):
        return reason
    if not q.dtype == k.dtype == v.dtype:
        return note("dtypes-differ", "queries, keys and values")
    return note("gpu-before-ampere") if older_than(q.device, AMPERE) else None


def _refuse_flash(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> Note | None:
    if reason := refuse_attention(q, k, v, triton=False):
        return reason
    if softcap:
        return note("softcap-not-supported")
    if q.shape[-1] % 8 or not q.shape[-1] == v.shape[-1] <= 256:
        return note("head-widths", queries=q.shape[-1], values=v.shape[-1])
    return None


def refuse_template(q: Tensor, k: Tensor, v: Tensor) -> Note | None:
    """Return why the template cannot take these; None where it can."""
    if reason := refuse_attention(q, k, v, triton=True) or refuse_spills(q):
        return reason
    if not 16 <= q.shape[-1] == v.shape[-1] <= 512:
        return note("template-head-widths", queries=q.shape[-1], values=v.shape[-1])
    return None


def sums_of_gradients(grad: Tensor, out: Tensor) -> Tensor:
    """The template's `delta`, fp32 [H, N]: <grad, out> of each token and head."""
    return (grad.float() * out.float()).sum(-1).t().contiguous()


def join_sinks(out: Tensor, logsumexp: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of a softmax, once sinks have a share of it."""
    if sinks is None:
        return out, logsumexp
    joined = torch.logaddexp(logsumexp, sinks.float()[:, None])
    return (out.float() * (logsumexp - joined).exp().t()[..., None]).to(out.dtype), joined


def _window(window: int, causal: bool) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0 if causal else window - 1} if window else {}


@varlen_attention.provider("flash", because=_FLASH, refuses=_refuse_flash)
def _(q, k, v, offsets, longest, scale, window, sinks, causal, softcap):
    made = torch.ops.aten._flash_attention_forward(
        *(q.contiguous(), k.contiguous(), v.contiguous()),
        *(offsets, offsets, longest, longest, 0.0, causal, False),
        scale=scale,
        **_window(window, causal),
    )
    return join_sinks(made[0], made[1], sinks)


@varlen_attention_backward.provider("flash", because=_FLASH, refuses=_refuse_flash)
def _(grad, q, k, v, offsets, longest, scale, window, sinks, causal, softcap, out0, out1):
    unread = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout, which there is none of
    return [
        *torch.ops.aten._flash_attention_backward(
            *(grad.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()),
            *(out0, out1, offsets, offsets, longest, longest, 0.0, causal, unread, unread),
            scale=scale,
            **_window(window, causal),
        ),
        sinks_gradient(grad, out0, out1, sinks),
    ]


@varlen_attention.provider("triton", because=_TEMPLATE, refuses=refuse_template)
def _(q, k, v, offsets, longest, scale, window, sinks, causal, softcap):
    made = templates.attention.forward(q, k, v, offsets, longest, scale, window, softcap, causal=causal)
    return join_sinks(*made, sinks)


@varlen_attention_backward.provider("triton", because=_TEMPLATE, refuses=refuse_template)
def _(grad, q, k, v, offsets, longest, scale, window, sinks, causal, softcap, out0, out1):
    rest = (out1, sums_of_gradients(grad, out0), offsets, longest, scale, window, softcap)
    made = templates.attention.backward(grad, q, k, v, *rest, causal=causal)
    return [*made, sinks_gradient(grad, out0, out1, sinks)]
