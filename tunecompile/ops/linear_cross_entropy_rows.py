"""The head of a language model and the loss of each row, for objectives that weight tokens, as one op."""

import torch
from torch import Tensor

from tunecompile._torch.fake_tensors import is_fake
from tunecompile.ir.op import Cost, op
from tunecompile.ops.linear_cross_entropy import (
    RAISED,
    add_gradients,
    chunks_of,
    linear_cross_entropy,
    logits_of,
    losses_and_gradient,
    raised,
    step_rows,
)

__all__ = ["linear_cross_entropy_rows", "linear_cross_entropy_rows_backward", "row_gradients", "score_rows"]


@op(cost=Cost.MATMUL, opaque=True, takes=linear_cross_entropy)
def linear_cross_entropy_rows(*, inner, train_hidden, train_weight, **given) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, for objectives that weight tokens; `linear_cross_entropy` is their sum.

    Under a frozen head the gradient of a row's hidden state is a vector, known in the forward pass, times the incoming
    gradient of its loss. So it is computed in the forward pass, while the logits exist. The gradient of a trained head
    sums over rows with weights that only the backward pass knows: there each chunk of logits is recomputed.

    Args:
        hidden: [T, H], any floating dtype. This and all that follow: as for `linear_cross_entropy`. The loss of a row
            without a label is 0.

    Returns:
        (losses, dhidden). The losses are [T] in fp32, or fp64 for fp64; dhidden, of rows whose losses count once
        each, is as hidden (fp32 for fp16, where no loss scaler has scaled it yet) if it alone is trained, else [0].
    """
    return score_rows(inner=inner, **given, ahead=train_hidden and not train_weight and inner is None)[:2]


def score_rows(
    hidden, weight, bias, inner, outer, labels, scale, softcap, ignore_index, label_smoothing, ahead, names=()
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(losses, the gradient of their sum at the hidden states if `ahead`, statistics by name), a chunk at a time.

    Products have the same shape, whatever is trained.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    losses = torch.zeros(hidden.shape[:1], dtype=wide, device=hidden.device)
    dhidden = torch.zeros(
        hidden.shape if ahead else (0,),
        dtype=wide if hidden.dtype == torch.float16 else hidden.dtype,
        device=hidden.device,
    )
    values = {name: torch.empty_like(losses, dtype=torch.bool if name == "is_top1" else wide) for name in names}
    if is_fake(labels):
        return losses, dhidden, values
    for part in chunks_of(step_rows(weight, False), labels, ignore_index):
        logits = logits_of(hidden[part], weight, bias, inner, outer, part)
        factors = raised(logits) if ahead else None
        losses[part], dlogits, found = losses_and_gradient(
            logits, labels[part], scale, softcap, ignore_index, label_smoothing, factors, ahead, names
        )
        for name in names:
            values[name][part] = found[name]
        if ahead:
            dhidden[part] = (dlogits @ weight).to(dhidden.dtype)
    if hidden.dtype == torch.float16:
        dhidden.div_(RAISED)
    return losses, dhidden, values


@linear_cross_entropy_rows.backward(gives=("hidden", "weight", "bias", "inner", "outer"), opaque=True)
def linear_cross_entropy_rows_backward(
    *, grad, hidden, weight, inner, labels, ignore_index, train_hidden, train_weight, out1, **rest
) -> list[Tensor]:
    """Return the gradients of `linear_cross_entropy_rows`.

    Args:
        grad: [T], of the losses, in their dtype.
        out1: dhidden, as the forward pass returned it. The others are its inputs.

    Returns:
        [dhidden, dweight, dbias, dinner, douter], in the inputs' shapes and dtypes; [0] for what is not trained or
        absent."""
    if train_weight or inner is not None:
        trained = dict(train_hidden=train_hidden, train_weight=train_weight)
        return row_gradients(grad, None, hidden, weight, inner, labels, ignore_index, **trained, **rest)
    counted = torch.where(labels != ignore_index, grad, 0)[:, None]
    first = out1 * counted if train_hidden else torch.zeros_like(out1)
    return [first.to(hidden.dtype), *(torch.zeros((0,), dtype=weight.dtype, device=weight.device) for _ in range(4))]


def row_gradients(
    grad, rises, hidden, weight, inner, labels, ignore_index, *, bias, outer, train_hidden, train_weight, **how
) -> list[Tensor]:
    """The gradients of the sum of grad times losses, and of rises times entropies if given: logits are made again."""
    like, wide = (hidden, weight, bias, inner, outer), grad.dtype
    made = [
        torch.zeros(
            of.shape if of is not None and wanted else (0,),
            dtype=hidden.dtype if of is hidden else wide,
            device=hidden.device,
        )
        for of, wanted in zip(like, (train_hidden, train_weight, train_weight, True, True))
    ]
    for part in () if is_fake(labels) else chunks_of(step_rows(weight, train_weight), labels, ignore_index):
        logits = logits_of(hidden[part], weight, bias, inner, outer, part)
        given = [None if of is None else of[part].contiguous() for of in (grad, rises)]
        how |= dict(ignore_index=ignore_index, factors=given[0], rises=given[1])
        _, dlogits, _ = losses_and_gradient(logits, labels[part], **how)
        add_gradients(dlogits, hidden[part], weight, inner, outer, part, *made)
    return [out.to(weight.dtype if of is None else of.dtype) for out, of in zip(made, like)]
