"""The head of a language model and its loss as one op, which computes logits for one chunk of rows at a time.

As in Liger's fused loss (Hsu et al., 2024, arXiv:2410.10989) and Apple's cut cross-entropy (Wijmans et al., 2024,
arXiv:2411.09009)."""

from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor

from tunecompile._torch.fake_tensors import is_fake
from tunecompile._torch.modules import linear
from tunecompile.ir.op import Cost, op
from tunecompile.ops.logit_losses import losses_and_gradient

__all__ = [
    "CHUNK_BYTES",
    "add_product",
    "chunk_rows",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "linear_cross_entropy_rows",
    "linear_cross_entropy_rows_backward",
    "mean_of_labelled",
    "workspace",
]

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
        weight.element_size() * (min(rows, _step(weight, weight.requires_grad)) * vocabulary + 2 * rows * hidden)
        + 4 * weight.numel() * weight.requires_grad
    )


def _step(weight: Tensor, trained: bool) -> int:
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
    for part in _parts(_step(weight, train_weight), labels, ignore_index):
        x, target = hidden[part], labels[part]
        logits = _logits(x, weight, bias, inner, outer, part)
        losses, dlogits = losses_and_gradient(logits, target, scale, softcap, ignore_index, label_smoothing)
        loss += losses.sum()
        _add(dlogits, x, weight, inner, outer, part, dhidden, dweight, dbias, dinner, douter)
    return loss, dhidden, dweight, dbias, dinner, douter


def _parts(step: int, labels: Tensor, ignore_index: int) -> Iterator[slice | Tensor]:
    """The rows of each chunk of `step`; on a CPU only labelled ones, since counting needs no synchronisation there."""
    rows = (labels != ignore_index).nonzero().flatten() if labels.device.type == "cpu" else None
    total = labels.shape[0] if rows is None else rows.shape[0]
    for start in range(0, total, step):
        yield slice(start, start + step) if rows is None else rows[start : start + step]


def _logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, inner: Tensor | None, outer: Tensor | None, part: slice | Tensor
) -> Tensor:
    """The logits of the rows `part`, with the hidden states `x`."""
    logits = linear(x, weight, bias)
    if inner is not None and outer is not None:
        logits += inner[part] @ outer.t()
    return logits


def _add(dlogits, x, weight, inner, outer, part, dhidden, dweight, dbias, dinner, douter) -> None:
    """Propagate the gradient of the logits of the rows `part` to the last five arguments, where they are not empty."""
    if dhidden.numel():
        dhidden[part] = (dlogits @ weight).to(dhidden.dtype)
    if dweight.numel():
        add_product(dweight, dlogits.t(), x)
    if dbias.numel():
        dbias.add_(dlogits.sum(0))
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
    elif total.is_cuda and total.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total.add_(a @ b)


@linear_cross_entropy.backward(
    saves=("hidden", "weight", "bias", "inner", "outer", "out1", "out2", "out3", "out4", "out5"),
    gives=("hidden", "weight", "bias", "inner", "outer"),
    cost=Cost.POINTWISE,
)
def linear_cross_entropy_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    inner: Optional[Tensor],
    outer: Optional[Tensor],
    out1: Tensor,
    out2: Tensor,
    out3: Tensor,
    out4: Tensor,
    out5: Tensor,
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


@op(cost=Cost.MATMUL, opaque=True)
def linear_cross_entropy_rows(
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
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, for objectives that weight tokens; `linear_cross_entropy` is their sum.

    Under a frozen head the gradient of a row's hidden state is a vector, known in the forward pass, times the incoming
    gradient of its loss. So it is computed in the forward pass, while the logits exist. The gradient of a trained head
    sums over rows with weights that only the backward pass knows: there each chunk of logits is recomputed.

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
        ignore_index: the label of rows without one, whose loss is 0.
        label_smoothing: the share, 0 to 1, of the target that is spread over all classes, as of
            `torch.nn.functional.cross_entropy`.
        train_hidden: whether hidden gets a gradient.
        train_weight: whether weight and bias get one.

    Returns:
        (losses, dhidden). The losses are [T] in fp32, or fp64 for fp64; dhidden, of rows whose losses count once
        each, is as hidden (fp32 for fp16, where no loss scaler has scaled it yet) if it alone is trained, else [0].
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    losses = torch.zeros(hidden.shape[:1], dtype=wide, device=hidden.device)
    dhidden = torch.zeros(
        hidden.shape if train_hidden and not train_weight and inner is None else (0,),
        dtype=wide if hidden.dtype == torch.float16 else hidden.dtype,
        device=hidden.device,
    )
    if is_fake(labels):
        return losses, dhidden
    for part in _parts(_step(weight, False), labels, ignore_index):
        logits = _logits(hidden[part], weight, bias, inner, outer, part)
        losses[part], dlogits = losses_and_gradient(
            logits, labels[part], scale, softcap, ignore_index, label_smoothing, gradient=bool(dhidden.numel())
        )
        if dhidden.numel():
            dhidden[part] = (dlogits @ weight).to(dhidden.dtype)
    return losses, dhidden


@linear_cross_entropy_rows.backward(
    saves=(
        "hidden",
        "weight",
        "bias",
        "inner",
        "outer",
        "labels",
        "scale",
        "softcap",
        "ignore_index",
        "label_smoothing",
        "train_hidden",
        "train_weight",
        "out1",
    ),
    gives=("hidden", "weight", "bias", "inner", "outer"),
    opaque=True,
)
def linear_cross_entropy_rows_backward(
    grad: Tensor,
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
    out1: Tensor,
) -> list[Tensor]:
    """Return the gradients of `linear_cross_entropy_rows`.

    Args:
        grad: [T], of the losses, in their dtype.
        out1: dhidden, as the forward pass returned it. The others are its inputs.

    Returns:
        [dhidden, dweight, dbias, dinner, douter], in the inputs' shapes and dtypes; [0] for what is not trained or
        absent."""
    like, wide = (hidden, weight, bias, inner, outer), grad.dtype
    if not train_weight and inner is None:
        counted = torch.where(labels != ignore_index, grad, 0)[:, None]
        first = out1 * counted if train_hidden else torch.zeros_like(out1)
        return [
            first.to(hidden.dtype),
            *(torch.zeros((0,), dtype=weight.dtype, device=weight.device) for _ in like[1:]),
        ]
    trained = (train_hidden, train_weight, train_weight, True, True)
    made = [
        torch.zeros(
            of.shape if of is not None and wanted else (0,),
            dtype=hidden.dtype if of is hidden else wide,
            device=hidden.device,
        )
        for of, wanted in zip(like, trained)
    ]
    if not is_fake(labels):
        for part in _parts(_step(weight, train_weight), labels, ignore_index):
            logits = _logits(hidden[part], weight, bias, inner, outer, part)
            _, dlogits = losses_and_gradient(
                logits, labels[part], scale, softcap, ignore_index, label_smoothing, grad[part].contiguous()
            )
            _add(dlogits, hidden[part], weight, inner, outer, part, *made)
    return [out.to(weight.dtype if of is None else of.dtype) for out, of in zip(made, like)]
