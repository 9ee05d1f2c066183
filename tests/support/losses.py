"""Losses by the log-probability of each token, as trainers spell them, and autograd functions as kernels define them."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """As TRL spells it since 0.16."""
    if logits.dtype in (torch.float32, torch.float64):
        selected = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
        sums = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
        return selected - sums
    rows = []
    for row, labels in zip(logits, index):
        rows.append(F.log_softmax(row, dim=-1).gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


def selective_of_newer(logits: Tensor, index: Tensor) -> Tensor:
    """As TRL 1.0 spells it."""
    index = index.unsqueeze(-1)
    if logits.dtype in (torch.float32, torch.float64):
        sums = torch.stack([torch.logsumexp(lg, dim=-1) for lg in logits])
        return (torch.gather(logits, dim=-1, index=index) - sums.unsqueeze(-1)).squeeze(-1)
    return torch.stack(
        [F.log_softmax(row, dim=-1).gather(dim=-1, index=labels) for row, labels in zip(logits, index, strict=True)]
    ).squeeze(-1)


def flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)


#: name -> (logits, labels) -> one number for each token, -log p or log p
SPELLINGS = {
    "cross entropy": lambda logits, labels: F.cross_entropy(*flat(logits.float(), labels), reduction="none").view(
        labels.shape
    ),
    "cross entropy of logits as they are": lambda logits, labels: nn.CrossEntropyLoss(reduction="none")(
        *flat(logits, labels)
    ).view(labels.shape),
    "smoothed": lambda logits, labels: F.cross_entropy(
        *flat(logits, labels), reduction="none", label_smoothing=0.1, ignore_index=7
    ).view(labels.shape),
    "nll": lambda logits, labels: F.nll_loss(
        F.log_softmax(logits, -1).flatten(0, 1), labels.flatten(), reduction="none"
    ).view(labels.shape),
    "nll of modules": lambda logits, labels: nn.NLLLoss(reduction="none")(
        nn.LogSoftmax(-1)(flat(logits, labels)[0]), labels.flatten()
    ).view(labels.shape),
    "gathered": lambda logits, labels: torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1),
    "gathered in fp32": lambda logits, labels: logits.log_softmax(dim=-1, dtype=torch.float32).gather(
        2, labels[..., None]
    )[..., 0],
    "gathered, flat": lambda logits, labels: torch.gather(
        F.log_softmax(flat(logits, labels)[0], dim=1), 1, labels.reshape(-1, 1)
    ).view(labels.shape),
    "taken along": lambda logits, labels: torch.take_along_dim(
        logits.float().log_softmax(-1), labels.unsqueeze(-1), dim=2
    ).squeeze(-1),
    "selective": selective_log_softmax,
    "selective, newer": selective_of_newer,
    "at a temperature": lambda logits, labels: selective_of_newer(logits / 0.7, labels),
    "at a temperature, in place": lambda logits, labels: selective_of_newer(logits.div_(0.7), labels),
    "logsumexp": lambda logits, labels: (
        logits.float().gather(-1, labels[..., None]).squeeze(-1) - logits.float().logsumexp(-1)
    ),
    "logsumexp, kept": lambda logits, labels: (
        logits.gather(-1, labels[..., None]) - torch.logsumexp(logits, -1, keepdim=True)
    )[..., 0],
    "by row": lambda logits, labels: torch.stack(
        [F.cross_entropy(row, label, reduction="none") for row, label in zip(logits, labels)]
    ),
    "row by row": lambda logits, labels: torch.stack(
        [row.log_softmax(-1).gather(-1, label[:, None])[:, 0] for row, label in zip(logits, labels)]
    ),
}


def weighed(write, slices: bool = False):
    """A loss of the user's own, by tokens' log-probabilities under weights of both signs."""

    def loss(model: nn.Module, inputs: dict) -> Tensor:
        logits, labels = model(inputs["input_ids"]).logits, inputs["labels"].clamp(min=0)
        logits, labels = (
            (logits[:, :-1], labels[:, 1:])
            if slices
            else (logits[..., :-1, :].contiguous(), labels[:, 1:].contiguous())
        )
        each = write(logits, labels).float()
        return (each * torch.linspace(-0.3, 2, each.numel(), device=each.device).view(each.shape)).sum() - F.logsigmoid(
            each.mean(1)
        ).mean()

    return loss


class LogSoftmax(torch.autograd.Function):
    """Reads them in its forward."""

    @staticmethod
    def forward(ctx, x):
        y = x.log_softmax(-1) * 1.0
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad - y.exp() * grad.sum(-1, keepdim=True)


class Weaker(torch.autograd.Function):
    """Returns what is deferred, and has a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


def each_of(cases: dict, model: nn.Module):
    """One after the other on the same model; what was found before is forgotten."""
    head = model.get_output_embeddings()._compiled_call_impl.head
    for name, case in cases.items():
        head.tally.rewritten = 0
        head.tally.refused.clear()
        print(name, file=sys.stderr)
        yield case
