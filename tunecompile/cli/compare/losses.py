"""The loss of a batch in a plain loop: the model's own, or that of direct preference optimisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunecompile.cli.compare.data import IGNORED
from tunecompile.cli.compare.spec import Job

BETA = 0.1  # of DPO: weight of the distance to the reference


def loss_of(model: nn.Module, batch: dict[str, Tensor], job: Job) -> Tensor:
    """The loss of a batch, a scalar with a graph.

    batch: the arguments of the model, with labels. For DPO the rows with chosen answers precede the rejected ones.
    """
    return dpo_loss(model, batch) if job.loss == "dpo" else model(**batch).loss


def dpo_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean of -log sigmoid(beta ((c - c_ref) - (r - r_ref))) over pairs (arXiv:2305.18290, equation 7).

    c and r are the log-probabilities of chosen and rejected answers. The reference is the model without its adapter.
    """
    ours = answer_log_probs(model, batch)
    with torch.no_grad(), model.disable_adapter():
        reference = answer_log_probs(model, batch)
    chosen, rejected = (ours - reference).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def answer_log_probs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The log-probability of each row's labelled tokens: [rows], in float32 or float64."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = batch["labels"][:, 1:]
    return (
        -F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
        .view(labels.shape)
        .sum(1)
    )
