"""Models under TRL's fused head."""

import pytest
import torch

from tests.support import zoo
from tests.support.models.pairs import small
from tunecompile.integrations.trl import OUTPUTS

utils = pytest.importorskip("trl.trainer.utils")
MARKS = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not hasattr(utils, "add_fused_lm_head"), reason="this TRL has no fused head"),
    pytest.mark.skipif(
        torch.cuda.is_available() and not hasattr(utils, "_use_triton"),
        reason="TRL 1.15 hands a CPU's tensors to Triton where there is a GPU",
    ),
]


def with_head(model: torch.nn.Module, **options) -> torch.nn.Module:
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    utils.add_fused_lm_head(base, **{"outputs": OUTPUTS, **options})
    return model


def padded_left() -> dict:
    inputs = zoo.batch(rows=3, length=12)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :4], mask[2, :7] = 0, 0
    return {**inputs, "attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}


def scored(model: torch.nn.Module, **inputs) -> tuple:
    """(outputs, gradients of weighed log-probabilities and entropies) of one step."""
    model.zero_grad()
    found = model(**(inputs or padded_left()), fused_lm_head=True)
    factors = torch.linspace(-1, 2, found.log_probs.numel()).view_as(found.log_probs)
    (found.loss + (found.log_probs * factors).sum() + 0.1 * (found.entropy * factors).sum()).backward()
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def headed() -> torch.nn.Module:
    return with_head(small())
