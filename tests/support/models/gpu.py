"""Models for tests on a GPU, whose sizes are no powers of two."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable

import torch

from tests.support import zoo

SHAPE = dict(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=2,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=4099,
)  # nothing is a power of two


def build(family: str, mode: str, **changes):
    model = zoo.make(family, **{**SHAPE, **changes}).to("cuda", torch.bfloat16)
    if mode == "qlora":
        model = zoo.quantize(model, torch.bfloat16)
    return model if mode == "full" else zoo.adapt(model, r=16, lora_alpha=16)


def median(values) -> float:
    return sorted(values)[len(values) // 2]


def assert_no_further(ours, eager, exact, limit: float = 1.25) -> None:
    """Gradients of a step are as near to those of fp32 as eager's: the median parameter's, and any one's within `limit`.

    Each step is (loss, gradients by name).
    """
    theirs, mine = zoo.errors(eager[1], exact[1]), zoo.errors(ours[1], exact[1])
    assert median(mine.values()) <= 1.02 * median(theirs.values())
    floor = torch.finfo(torch.bfloat16).eps
    worst = max(mine, key=lambda name: mine[name] / max(theirs[name], floor))
    assert mine[worst] / max(theirs[worst], floor) < limit, (worst, mine[worst], theirs[worst])


def pooled(errors: Iterable[dict[str, float]]) -> dict[str, float]:
    """The root mean square of each parameter's errors in several batches, over all layers.

    A gradient of few numbers, such as that of a router's bias, has its luck in one batch and layer.
    """
    squares = defaultdict(list)
    for each in errors:
        for name, error in each.items():
            squares[re.sub(r"\.\d+\.", ".N.", name)].append(error**2)
    return {name: math.sqrt(sum(each) / len(each)) for name, each in squares.items()}


def against_fp32(reference, models, batches, told=lambda name: True) -> list[dict[str, float]]:
    """The pooled errors of each model's gradients, of the parameters that count."""

    def step(model, inputs):
        return {name: g for name, g in zoo.step(model, inputs)[1].items() if told(name)}

    made = [[] for _ in models]
    for inputs in batches:
        true = step(reference, inputs)
        for model, each in zip(models, made):
            each.append(zoo.errors(step(model, inputs), true))
    return [pooled(each) for each in made]


def backward(model, inputs):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model.train()(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
