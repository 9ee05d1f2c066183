"""Losses people train on beside that of the labels: of their own on logits, a teacher's, a preference's. A cell each (see `cells.py`)."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import zoo
from tests.support.matrix.cells import DEVICE, Cell, lora, small


def whole() -> nn.Module:
    return small(num_attention_heads=2)


def shifted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits[..., :-1, :].reshape(-1, logits.shape[-1]), labels[..., 1:].reshape(-1)


#: of logits and labels, in a loop of the user's own
WRITTEN = {
    "cross_entropy of shifted logits": lambda logits, labels: F.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)
    ),
    "cross_entropy of contiguous logits": lambda logits, labels: F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, logits.size(-1)), labels[..., 1:].contiguous().view(-1)
    ),
    "CrossEntropyLoss with label smoothing": lambda logits, labels: nn.CrossEntropyLoss(label_smoothing=0.1)(
        logits.float().flatten(0, 1), labels.flatten()
    ),
    "cross_entropy of transposed logits": lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels),
    "without a reduction, at a temperature": lambda logits, labels: F.cross_entropy(
        logits.view(-1, logits.shape[-1]) / 0.7, labels.view(-1), reduction="none"
    ).mean(),
    "log_softmax and gather": lambda logits, labels: (
        -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).mean()
    ),
    "KL divergence to the model's own logits": lambda logits, labels: F.kl_div(
        logits.log_softmax(-1), logits.detach().roll(1, 0).softmax(-1), reduction="batchmean"
    ),
    "a sum over rows": lambda logits, labels: sum(F.cross_entropy(row, label) for row, label in zip(logits, labels)),
    "logits joined with others": lambda logits, labels: F.cross_entropy(
        torch.cat([logits, logits * 2]).flatten(0, 1), labels.repeat(2, 1).flatten()
    ),
    "a z-loss beside it": lambda logits, labels: (
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-4 * logits.logsumexp(-1).square().mean()
    ),
    "logits that are masked": lambda logits, labels: F.cross_entropy(
        logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) > 200, -1e9).flatten(0, 1),
        labels.clamp(max=200).flatten(),
    ),
    "another ignore_index": lambda logits, labels: F.cross_entropy(
        logits.squeeze(0).unsqueeze(0).view(-1, logits.shape[-1]), labels.view(-1).clamp(min=0), ignore_index=0
    ),
    "a focal loss": lambda logits, labels: (lambda each: ((1 - torch.exp(-each)).square() * each).mean())(
        F.cross_entropy(*shifted(logits, labels), reduction="none")
    ),
}


def weighed(model: nn.Module, inputs: dict) -> Tensor:
    """Each token has a weight, and the loss is divided by their sum."""
    logits, labels = shifted(model(inputs["input_ids"]).logits, inputs["labels"])
    weights = torch.arange(len(labels), device=labels.device) % 3 * (labels != -100)
    return (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / weights.sum()


@functools.cache
def teacher() -> nn.Module:
    """Wider than the student, with the same words."""
    return zoo.make("qwen2", num_hidden_layers=1, hidden_size=96).to(DEVICE).eval().requires_grad_(False)


def distilled(model: nn.Module, inputs: dict, temperature: float = 2.0, share: float = 0.5) -> Tensor:
    """Part of it is the labels', part the divergence from the teacher's distribution."""
    with torch.no_grad():
        target = teacher()(inputs["input_ids"]).logits
    out = model(**inputs)
    apart = F.kl_div(
        F.log_softmax(out.logits / temperature, -1),
        F.log_softmax(target / temperature, -1),
        reduction="batchmean",
        log_target=True,
    )
    return share * out.loss + (1 - share) * temperature**2 / out.logits.shape[1] * apart


def hidden_states_distilled(model: nn.Module, inputs: dict) -> Tensor:
    """What the layers give follows what an earlier layer gave."""
    out = model(**inputs, output_hidden_states=True)
    return out.loss + F.mse_loss(out.hidden_states[-1], out.hidden_states[0].detach())


def answers(model: nn.Module, inputs: dict) -> Tensor:
    """The log-probability of each row's labelled tokens, as TRL's DPOTrainer computed it before its fused head."""
    from trl.trainer.utils import selective_log_softmax

    logits, labels = model(inputs["input_ids"]).logits[..., :-1, :].contiguous(), inputs["labels"][..., 1:].contiguous()
    each = selective_log_softmax(logits, labels.clamp(min=0))
    return torch.where(labels == -100, 0.0, each).sum(1)


def dpo(model: nn.Module, inputs: dict) -> Tensor:
    """Its reference is the model without its adapter."""
    ours = answers(model, inputs)
    with torch.no_grad(), model.disable_adapter():
        reference = answers(model, inputs)
    chosen, rejected = (ours - reference).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def grpo(model: nn.Module, inputs: dict, entropy: bool = True) -> Tensor:
    """As of TRL 1.0: a temperature in place, the ratio to what the policy was, clipped, and the entropy as a metric."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logits = model(inputs["input_ids"]).logits[:, :-1, :][:, -8:, :]
    logits.div_(0.9)
    each = selective_log_softmax(logits, inputs["input_ids"][:, -8:])
    weight = 1.0
    if entropy:
        with torch.no_grad():
            weight = 0.5 + entropy_from_logits(logits)
    ratio, advantages = (
        torch.exp(each - each.detach() * 1.01),
        torch.linspace(1, -1, len(each), device=each.device).unsqueeze(1),
    )
    return -(torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * weight).mean()


def two_forwards(model: nn.Module, inputs: dict) -> Tensor:
    return model(**inputs).loss + 2 * model(**zoo.batch(seed=9, rows=3, device=DEVICE)).loss


def evaluated_before_the_backward(model: nn.Module, inputs: dict) -> Tensor:
    loss = model(**inputs).loss
    model.eval()
    with torch.no_grad():
        model(**zoo.batch(seed=8, device=DEVICE))
    model.train()
    return loss


def two(rows: int = 2) -> list[dict]:
    """Of one shape: what changes here is the loss."""
    return [zoo.batch(seed=seed, rows=rows) for seed in range(2)]


LOSSES: dict[str, dict] = {
    **{
        f"the user's: {name}": dict(
            loss=lambda model, inputs, write=write: write(model(inputs["input_ids"]).logits, inputs["labels"])
        )
        for name, write in WRITTEN.items()
    },
    "the user's: tokens with weights": dict(loss=weighed),
    "a teacher's logits": dict(loss=distilled),
    "a teacher's logits, LoRA": dict(build=lora(), loss=distilled),
    "hidden states": dict(loss=hidden_states_distilled),
    "DPO, the adapter disabled as reference": dict(build=lora(), loss=dpo, batches=lambda: two(4)),
    "GRPO of TRL 1.0, entropy as a weight": dict(build=lora(), loss=grpo, batches=lambda: two(4)),
    "two forwards before one backward": dict(loss=two_forwards),
    "evaluation between forward and backward": dict(loss=evaluated_before_the_backward),
}
QUICK = {
    "a teacher's logits",
    *(f"the user's: {name}" for name in ("cross_entropy of shifted logits", "logits joined with others")),
}
CELLS = [
    Cell("loss", name, **{"build": whole, "batches": two, "quick": name in QUICK, **what})
    for name, what in LOSSES.items()
]
