"""The head of a language model and its loss as one op, which computes logits for one chunk of rows at a time.

As in Liger's fused loss (Hsu et al., 2024, arXiv:2410.10989) and Apple's cut cross-entropy (Wijmans et al., 2024,
arXiv:2411.09009)."""

from collections.abc import Iterator, Sequence
from typing import Optional

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile._torch.fake_tensors import is_fake
from tunecompile._torch.modules import linear
from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.notes import Note, note

__all__ = [
    "CHUNK_BYTES",
    "NO_LABEL",
    "RAISED",
    "STATISTICS",
    "add_gradients",
    "add_product",
    "by_torch",
    "chunk_rows",
    "chunks_of",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "logits_of",
    "losses_and_gradient",
    "mean_of_labelled",
    "raised",
    "row_losses",
    "runs_template",
    "step_rows",
    "workspace",
]

#: times which fp16 holds gradients before a loss is scaled: their sums over a vocabulary fit, with weights below 32
RAISED = 1024.0
#: the ignore_index of what counts every row: any index out of range stays an error, -100 included
NO_LABEL = torch.iinfo(torch.int64).min
CHUNK_BYTES = 256 << 20  #: of fp32 logits; at least 1,024 rows, below which the matrix product loses speed


def chunk_rows(vocabulary: int) -> int:
    """Return how many rows of hidden states make one chunk of logits.

    Args:
        vocabulary: columns of the logits.

    Returns:
        Rows: as many as `CHUNK_BYTES` hold in fp32, and 1,024 at least.
    """
    return max(1024, CHUNK_BYTES // (4 * vocabulary))


def workspace(weight: Tensor, rows: int) -> int:
    """Return the bytes that the op needs beside its inputs, on a GPU.

    Args:
        weight: [V, H], in the dtype of the logits.
        rows: of hidden states.

    Returns:
        Bytes: of a chunk of logits, and of the gradients it returns.
    """
    vocabulary, hidden = weight.shape
    return (
        weight.element_size() * (min(rows, step_rows(weight, weight.requires_grad)) * vocabulary + 2 * rows * hidden)
        + 4 * weight.numel() * weight.requires_grad
    )


def step_rows(weight: Tensor, trained: bool) -> int:
    """The rows of a chunk. Each chunk reads and writes the gradient of a trained weight once.

    So chunks are larger then, with as many logits as the weight has values: 39.7 ms, and 43.2 with chunks of 1,024 rows
    (8,192 rows, V = 128,256, H = 4,096, H200).
    """
    return max(chunk_rows(weight.shape[0]), weight.shape[1] if trained else 0)


def mean_of_labelled(total: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """The mean loss of the rows that have a label, from their sum.

    Args:
        total: [], fp32 or fp64.
        labels: int64 [T].
        ignore_index: what a row without a label has.

    Returns:
        [], total's dtype. Without any label it is NaN, as in torch, and its gradients are zero.
    """
    count = (labels != ignore_index).sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


@op(cost=Cost.MATMUL, opaque=True)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    inner: Optional[Tensor],
    outer: Optional[Tensor],
    labels: Tensor,
    scale: float,
    softcap: float,
    ignore_index: int,
    label_smoothing: float,
    train_hidden: bool,
    train_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the sum over labelled rows of the loss of a head, and its gradients.

    A row's loss is cross_entropy(softcap(scale * (hidden weight^T + bias + inner outer^T))). The gradients for
    d(loss) = 1 are computed in the forward pass, while a chunk of logits exists, so that no logit is saved or
    recomputed. Rows without a label cost nothing where counting them needs no host synchronisation, that is on the
    CPU.

    Args:
        hidden: [T, H], any floating dtype.
        weight: [V, H], in hidden's dtype.
        bias: [V], in hidden's dtype, or None.
        inner: [T, r], what an adapter's first matrix makes of the hidden states, any floating dtype; or None. If
            given, it is trained.
        outer: [V, r], the adapter's second matrix, in inner's dtype; None where inner is.
        labels: int64 [T], one class a row.
        scale: a factor of the logits; Triton's kernel is for positive ones, for others plain torch computes.
        softcap: c of c * tanh(logits / c) (Gemma 2, arXiv:2408.00118), in the units of the logits; 0 for none.
        ignore_index: the label of rows without one.
        label_smoothing: the share, 0 to 1, of the target that is spread over all classes, as of
            `torch.nn.functional.cross_entropy`.
        train_hidden: whether hidden gets a gradient.
        train_weight: whether weight and bias get one.

    Returns:
        (loss, dhidden, dweight, dbias, dinner, douter). The loss is a scalar in fp32, or fp64 for fp64; of the
        gradients those of trained inputs have their shapes, the others [0]; in that dtype as well, but for dhidden,
        which is in hidden's: unless that is fp16, where no loss scaler has scaled it yet."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    dhidden = torch.zeros(
        hidden.shape if train_hidden else (0,),
        dtype=wide if hidden.dtype == torch.float16 else hidden.dtype,
        device=hidden.device,
    )
    dweight = torch.zeros(weight.shape if train_weight else (0,), dtype=wide, device=weight.device)
    dbias = torch.zeros(
        weight.shape[:1] if train_weight and bias is not None else (0,), dtype=wide, device=weight.device
    )
    dinner, douter = (
        torch.zeros(m.shape if m is not None else (0,), dtype=wide, device=hidden.device) for m in (inner, outer)
    )
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    if is_fake(labels):
        return loss, dhidden, dweight, dbias, dinner, douter
    for part in chunks_of(step_rows(weight, train_weight), labels, ignore_index):
        x, target = hidden[part], labels[part]
        logits = logits_of(x, weight, bias, inner, outer, part)
        losses, dlogits, _ = losses_and_gradient(
            logits, target, scale, softcap, ignore_index, label_smoothing, raised(logits)
        )
        loss += losses.sum()
        add_gradients(dlogits, x, weight, inner, outer, part, dhidden, dweight, dbias, dinner, douter)
    if hidden.dtype == torch.float16:
        for made in (dhidden, dweight, dbias, dinner, douter):
            made.div_(RAISED)
    return loss, dhidden, dweight, dbias, dinner, douter


def raised(logits: Tensor) -> Tensor | None:
    """Factors of the rows' gradients at logits that no loss scaler has scaled yet, `RAISED` where fp16 holds them.

    p - 1 of a sure token is far below what fp16 has all its bits for, and so is its product with the weight: at
    p = 1 - 3.5e-6 a third of it was lost.
    """
    if logits.dtype != torch.float16:
        return None
    return torch.full(logits.shape[:1], RAISED, dtype=torch.float32, device=logits.device)


def chunks_of(step: int, labels: Tensor, ignore_index: int) -> Iterator[slice | Tensor]:
    """The rows of each chunk of `step`; on a CPU only labelled ones, since counting needs no synchronisation there."""
    rows = (labels != ignore_index).nonzero().flatten() if labels.device.type == "cpu" else None
    total = labels.shape[0] if rows is None else rows.shape[0]
    for start in range(0, total, step):
        yield slice(start, start + step) if rows is None else rows[start : start + step]


def logits_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, inner: Tensor | None, outer: Tensor | None, part: slice | Tensor
) -> Tensor:
    """The logits of the rows `part`, with the hidden states `x`."""
    logits = linear(x, weight, bias)
    if inner is not None and outer is not None:
        logits += inner[part] @ outer.t()
    return logits


def add_gradients(dlogits, x, weight, inner, outer, part, dhidden, dweight, dbias, dinner, douter) -> None:
    """Propagate the gradient of the logits of the rows `part` to the last five arguments, where they are not empty."""
    if dhidden.numel():
        dhidden[part] = (dlogits @ weight).to(dhidden.dtype)
    if dweight.numel():
        add_product(dweight, dlogits.t(), x)
    if dbias.numel():
        dbias.add_(dlogits.sum(0, dtype=dbias.dtype))
    if inner is not None:
        narrow = dlogits.to(outer.dtype)
        dinner[part] = (narrow @ outer).to(dinner.dtype)
        add_product(douter, narrow.t(), inner[part])


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a b, in total's precision.

    A GPU's product adds to fp32 by itself: one pass over a gradient of 2 GB instead of three, and no temporary product.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.dtype == torch.float16 and not total.is_cuda:  # a sum of raised gradients is more than it holds
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif total.is_cuda and total.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total.add_(a @ b)


def _example(draw) -> list:
    """Logits behind a soft cap, one row without a label."""
    target = draw.codes(draw.rows, upto=40).long()
    target[1] = -100
    return [draw.normal(draw.rows, draw.width, scale=4.0), target, 0.5, 30.0, -100, 0.1]


@op(cost=Cost.POINTWISE, example=_example)
def row_losses(
    logits: Tensor, target: Tensor, scale: float, softcap: float, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of each row of logits, and the gradient of their sum.

    No graph has this op, since heads and losses run beside graphs. It is one so that its template is tried as others
    are before it is used on a card without tests.

    Args:
        logits: [T, V], any floating dtype.
        target: int64 [T], one class a row.
        scale: a factor of the logits.
        softcap: c of c * tanh(scale * logits / c) (arXiv:2408.00118); 0 for none.
        ignore_index: the label of rows without one.
        label_smoothing: the share, 0 to 1, of the target that is spread over all classes.

    Returns:
        (losses, gradient): [T] in fp32, or fp64 for fp64, and [T, V] in the dtype of the logits.
    """
    return by_torch(logits, target, scale, softcap, ignore_index, label_smoothing, None, True)[:2]


def _refuse(logits: Tensor, scale: float) -> Note | None:
    if logits.dtype == torch.float64:
        return note("not-half-precision", detail="float64")
    if scale <= 0:
        return note("factor-not-positive", detail=scale)
    return refuse_gpu(logits, made=torch.float16 if logits.dtype == torch.float32 else None)


@row_losses.provider("triton", because="two reads and one write of the logits", refuses=_refuse)
def _(logits, target, scale, softcap, ignore_index, label_smoothing):
    return _by_template(logits.clone(), target, scale, softcap, ignore_index, label_smoothing, None, True)[:2]


def runs_template(logits: Tensor, target: Tensor, scale: float, softcap: float) -> bool:
    """Return whether the template computes with these logits: on a GPU, unless it failed its trial there."""
    return logits.is_cuda and row_losses.choose((logits, target, scale, softcap, -100, 0.0)).name == "triton"


def losses_and_gradient(
    logits: Tensor,
    target: Tensor,
    scale: float,
    softcap: float,
    ignore_index: int,
    label_smoothing: float,
    factors: Tensor | None = None,
    gradient: bool = True,
    names: Sequence[str] = (),
    rises: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss of each row and, with `gradient`, that of the sum of factors times losses.

    Args:
        logits: as all that follow, those of `row_losses`. They may be overwritten.
        factors: [T], of each row's gradient, not of its loss; None for ones.
        gradient: whether there is one.
        names: of `STATISTICS`, which are of rows that all have a label, without smoothing.
        rises: [T], of the rows' entropies, which are added to what the gradient is of; None for zeros.

    Returns:
        (losses, gradient, statistics): the first two as `row_losses`; without `gradient` the second is the logits.
    """
    compute = _by_template if runs_template(logits, target, scale, softcap) else by_torch
    return compute(logits, target, scale, softcap, ignore_index, label_smoothing, factors, gradient, names, rises)


def _by_template(
    logits, target, scale, softcap, ignore_index, label_smoothing, factors, gradient, names=(), rises=None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    how = {"softcap": softcap or None, "scale": scale, "grad": gradient, "factors": factors if gradient else None}
    if names or rises is not None:
        losses, values = templates.cross_entropy.statistics_and_grad_(
            logits, target, names, entropy_factors=rises, **how
        )
        return losses, logits, values
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return templates.cross_entropy.loss_and_grad_(logits, target, **options, **how), logits, {}


def by_torch(
    logits, target, scale, softcap, ignore_index, label_smoothing, factors, gradient, names=(), rises=None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What `losses_and_gradient` returns."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z, t = wide * scale if scale != 1.0 else wide, None
    if softcap:
        t = torch.tanh(z / softcap)
        z = t * softcap
    logp = torch.log_softmax(z, -1)
    labelled = target != ignore_index
    safe = torch.where(labelled, target, 0)[:, None]
    picked, vocabulary = -logp.gather(1, safe), logits.shape[-1]
    smooth = -logp.mean(-1, keepdim=True) if label_smoothing else 0.0
    losses = (((1 - label_smoothing) * picked + label_smoothing * smooth) * labelled[:, None]).flatten()
    values = {name: STATISTICS[name](z, logp, safe) for name in names}
    if not gradient:
        return losses, logits, values
    rise = (
        0.0 if rises is None else rises[:, None] * logp.exp() * (logp + STATISTICS["entropy"](z, logp, safe)[:, None])
    )
    d = logp.exp_()
    d.scatter_add_(1, safe, torch.full_like(picked, label_smoothing - 1))
    if label_smoothing:
        d.sub_(label_smoothing / vocabulary)
    d.mul_(labelled[:, None] if factors is None else torch.where(labelled, factors, 0)[:, None])
    d.sub_(rise)
    if t is not None:
        d = d * (1 - t * t)
    if scale != 1.0:
        d = d * scale
    return losses, d.to(logits.dtype), values


def _is_top1(z: Tensor, logp: Tensor, at: Tensor) -> Tensor:
    picked, columns = z.gather(1, at), torch.arange(z.shape[1], device=z.device)
    return ((z < picked) | ((z == picked) & (columns >= at))).all(-1)


#: of a row's distribution: its entropy, log(sum of p^2), the mean of its logits, whether the label is the first maximum
STATISTICS = {
    "entropy": lambda z, logp, at: -(logp.exp() * logp).sum(-1),
    "log_sum_sq_probs": lambda z, logp, at: (2 * logp).logsumexp(-1),
    "mean_logits": lambda z, logp, at: z.mean(-1),
    "is_top1": _is_top1,
}


@linear_cross_entropy.backward(gives=("hidden", "weight", "bias", "inner", "outer"), cost=Cost.POINTWISE)
def linear_cross_entropy_backward(
    grad, hidden, weight, bias, inner, outer, out1, out2, out3, out4, out5
) -> list[Tensor]:
    """Return the gradients of `linear_cross_entropy`: those that its forward pass computed, times d(loss).

    Args:
        grad: of the loss, a scalar in its dtype.
        out1: dhidden, out2: dweight, out3: dbias, out4: dinner, out5: douter, as the forward pass returned them. The
            others are its inputs.

    Returns:
        [dhidden, dweight, dbias, dinner, douter], in the shapes of out1 to out5 and the inputs' dtypes.
    """
    like = (hidden, weight, bias, inner, outer)
    return [
        _times(out, grad, weight.dtype if of is None else of.dtype)
        for out, of in zip((out1, out2, out3, out4, out5), like)
    ]


def _times(out: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return out * grad, rounded to `dtype` at once: an fp32 copy of a trained head's gradient would set the peak."""
    if type(out) is not Tensor or out.dtype == dtype:  # traced
        return (out * grad).to(dtype)
    return torch.mul(out, grad, out=torch.empty_like(out, dtype=dtype))
