"""A bias that is added to the head's product, as BART's and Marian's `final_logits_bias`."""

import pytest
import torch
import torch.nn.functional as F

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_same_run
from tests.support.models.pairs import pair
from tunecompile.runtime.loss_head.deferred import LazyTensor

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

BIAS = torch.linspace(-2.0, 2.0, 256)


def loss_of(change):
    def run(m):
        inputs = zoo.batch()
        logits = change(m(inputs["input_ids"]).logits)
        return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())

    return run


def head_of(model):
    return next(m for m in tunecompile.report(model).matches if m.family == "linear_cross_entropy")


ADDED = {
    "before it is scaled": lambda logits: (logits + BIAS[None]) * 0.5,
    "on the left": lambda logits: BIAS[None, None] + logits,
    "by name": lambda logits: torch.add(logits, BIAS).float(),
}
REAL = {
    "one a row": lambda logits: logits + BIAS[: logits.shape[1], None],
    "learned": lambda logits: logits + BIAS.clone().requires_grad_(),
    "scaled": lambda logits: torch.add(logits, BIAS, alpha=2),
    "after a scale": lambda logits: logits * 0.5 + BIAS,
    "twice": lambda logits: logits + BIAS + BIAS,
}


def test_losses_of_a_bias_and_of_what_is_none():
    model, reference = pair()
    for change in (*ADDED.values(), *REAL.values()):
        assert_same_run(model, reference, loss_of(change))
    made = {name: change(model(zoo.batch()["input_ids"]).logits) for name, change in (ADDED | REAL).items()}
    assert [name for name, logits in made.items() if isinstance(logits, LazyTensor)] == [
        *ADDED,
        *("after a scale", "twice"),  # recorded, and refused by the loss
    ]
    assert head_of(model).rewritten == 1
