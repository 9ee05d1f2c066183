"""The head of a language model and its loss as one op: the logits exist a chunk at a time only."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile.op import Cost, has_triton, op

CHUNK_BYTES = 256 << 20  #: of fp32 logits; at least 1,024 rows, below which the matrix product loses speed


def chunk_rows(vocabulary: int) -> int:
    return max(1024, CHUNK_BYTES // (4 * vocabulary))


def workspace(weight: Tensor, rows: int) -> int:
    """Bytes the op needs beside its inputs, on a GPU: a chunk of logits, and the gradients it returns."""
    vocabulary, hidden = weight.shape
    return weight.element_size() * (min(rows, chunk_rows(vocabulary)) * vocabulary + 2 * rows * hidden) + 4 * weight.numel() * weight.requires_grad


@op(cost=Cost.MATMUL, opaque=True)
def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], inner: Optional[Tensor], outer: Optional[Tensor], labels: Tensor,
                         scale: float, softcap: float, ignore_index: int, label_smoothing: float, train_hidden: bool, train_weight: bool,
                         ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, dhidden, dweight, dbias, dinner, douter) of sum over labelled rows of
    cross_entropy(softcap(scale * (hidden weight^T + bias + inner outer^T))).

    hidden: [T, H], weight: [V, H], labels: int64 [T], where `ignore_index` marks rows without a label; loss: fp32 scalar. inner: [T, r] and
    outer: [V, r] are an adapter's, what its first matrix makes of the hidden states and its second one; both are trained.
    The gradients for d(loss) = 1 are computed in the forward pass, where each chunk of logits is at hand, so that no logit is
    kept or computed twice (the idea of Liger's and Apple's fused losses). Untrained inputs get an empty gradient. fp16 hidden
    gets its gradient in fp32: a loss scaler has not scaled it yet. Rows without a label cost nothing where counting them needs
    no host synchronisation, that is on the CPU.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    dhidden = torch.zeros(hidden.shape if train_hidden else (0,), dtype=wide if hidden.dtype == torch.float16 else hidden.dtype,
                          device=hidden.device)
    dweight = torch.zeros(weight.shape if train_weight else (0,), dtype=wide, device=weight.device)
    dbias = torch.zeros(weight.shape[:1] if train_weight and bias is not None else (0,), dtype=wide, device=weight.device)
    dinner, douter = (torch.zeros(m.shape if m is not None else (0,), dtype=wide, device=hidden.device) for m in (inner, outer))
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    if isinstance(labels, torch._subclasses.FakeTensor):
        return loss, dhidden, dweight, dbias, dinner, douter
    rows = (labels != ignore_index).nonzero().flatten() if labels.device.type == "cpu" else None
    total = hidden.shape[0] if rows is None else rows.shape[0]
    for start in range(0, total, step := chunk_rows(weight.shape[0])):
        part = slice(start, start + step) if rows is None else rows[start:start + step]
        loss += _chunk(hidden, weight, bias, inner, outer, labels, scale, softcap, ignore_index, label_smoothing, part, dhidden, dweight, dbias,
                       dinner, douter)
    return loss, dhidden, dweight, dbias, dinner, douter


def _chunk(hidden, weight, bias, inner, outer, labels, scale, softcap, ignore_index, label_smoothing, part, dhidden, dweight, dbias, dinner,
           douter) -> Tensor:
    """The loss of the rows `part`; their gradients are stored into, or added to, the last five arguments."""
    x, target = hidden[part], labels[part]
    logits = F.linear(x, weight, bias)
    if inner is not None:
        logits += inner[part] @ outer.t()
    loss, dlogits = _loss_and_gradient(logits, target, scale, softcap, ignore_index, label_smoothing)
    if dhidden.numel():
        dhidden[part] = (dlogits @ weight).to(dhidden.dtype)
    if dweight.numel():
        dweight.add_(dlogits.t() @ x)
    if dbias.numel():
        dbias.add_(dlogits.sum(0))
    if inner is not None:
        narrow = dlogits.to(outer.dtype)
        dinner[part] = (narrow @ outer).to(dinner.dtype)
        douter.add_(narrow.t() @ inner[part])
    return loss


def _loss_and_gradient(logits: Tensor, target: Tensor, scale: float, softcap: float, ignore_index: int,
                       label_smoothing: float) -> tuple[Tensor, Tensor]:
    """(sum of losses, d(sum)/d(logits) in the dtype of the logits). The logits may be overwritten."""
    if logits.is_cuda and scale > 0 and has_triton():
        from tunecompile.templates import cross_entropy

        loss, _ = cross_entropy.loss_and_grad_(logits, target, ignore_index=ignore_index, softcap=softcap or None, scale=scale,
                                               label_smoothing=label_smoothing)
        return loss.sum(), logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = wide * scale if scale != 1.0 else wide
    if softcap:
        t = torch.tanh(z / softcap)
        z = t * softcap
    logp = torch.log_softmax(z, -1)
    labelled = target != ignore_index
    safe = torch.where(labelled, target, 0)[:, None]
    picked, vocabulary = -logp.gather(1, safe), logits.shape[-1]
    smooth = -logp.mean(-1, keepdim=True) if label_smoothing else 0.0
    loss = ((1 - label_smoothing) * picked + label_smoothing * smooth) * labelled[:, None]
    d = logp.exp_()
    d.scatter_add_(1, safe, torch.full_like(picked, label_smoothing - 1))
    if label_smoothing:
        d.sub_(label_smoothing / vocabulary)
    d.mul_(labelled[:, None])
    if softcap:
        d = d * (1 - t * t)
    if scale != 1.0:
        d = d * scale
    return loss.sum(), d.to(logits.dtype)


@linear_cross_entropy.backward(saves=("hidden", "weight", "bias", "inner", "outer", "out1", "out2", "out3", "out4", "out5"),
                               gives=("hidden", "weight", "bias", "inner", "outer"), cost=Cost.POINTWISE)
def linear_cross_entropy_backward(grad: Tensor, hidden: Tensor, weight: Tensor, bias: Optional[Tensor], inner: Optional[Tensor],
                                  outer: Optional[Tensor], out1: Tensor, out2: Tensor, out3: Tensor, out4: Tensor, out5: Tensor) -> list[Tensor]:
    """[dhidden, dweight, dbias, dinner, douter]: what the forward pass computed, times d(loss)."""
    like = (hidden, weight, bias, inner, outer)
    return [(out * grad).to(weight.dtype if of is None else of.dtype) for out, of in zip((out1, out2, out3, out4, out5), like)]
