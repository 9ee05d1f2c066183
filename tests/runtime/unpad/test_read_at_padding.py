"""Logits at padding that a loss of the user's reads: of each call of a step, and of the step's own weights and masks."""

import copy

import pytest
import torch
import torch.nn.functional as F

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.models.pairs import attending
from tests.support.notes import has

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def two_answers(model, batch):
    """Consistency at all positions, as R-Drop has it (Liang et al. 2021)."""
    noise = 0.05 * torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    others = {name: value for name, value in batch.items() if name != "input_ids"}
    one = model(**batch)
    two = model(inputs_embeds=model.get_input_embeddings()(batch["input_ids"]) + noise, **others)
    p, q = one.logits.log_softmax(-1), two.logits.log_softmax(-1)
    return one.loss + two.loss + 4 * ((p.exp() - q.exp()) * (p - q)).sum(-1).mean()


def of_other_weights(model, batch):
    """They are put back before its logits are read."""
    weights = {name: parameter * 1.2 for name, parameter in model.named_parameters()}
    out = torch.func.functional_call(model, weights, (), dict(batch))
    return out.loss + out.logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("loss", [two_answers, of_other_weights])
def test_losses_that_read_padding(loss):
    reference = attending().double().train()
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    for seed in range(2):
        found = []
        for each in (model, reference):
            each.zero_grad()
            value = loss(each, padded(seed=seed))
            value.backward()
            found.append((value.item(), {name: p.grad for name, p in each.named_parameters()}))
        (mine, ours), (exact, theirs) = found
        assert mine == pytest.approx(exact, rel=1e-6)
        assert max(zoo.errors(ours, theirs).values()) < 1e-6
    reason = "logits-read" if loss is two_answers else "weights-of-call"
    assert has(model, "padding-kept", reason=reason)


def test_with_dropout_a_loss_is_that_of_its_calls_logits():
    """The call is made once more for what stands at padding, and draws other masks then."""
    pytest.importorskip("peft")
    model = zoo.adapt(attending().double(), lora_dropout=0.4, lora_alpha=64)
    tunecompile.optimize(model.train(), executor="eager")
    for seed in range(2):
        batch = padded(seed=seed)
        out = model(**batch)
        again = F.cross_entropy((out.logits + 0).transpose(1, 2)[:, :, :-1], batch["labels"][:, 1:])
        assert out.loss.item() == pytest.approx(again.item(), rel=1e-5)
