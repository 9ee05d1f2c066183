"""Real training loops: losses and gradients as without `optimize`, whatever the batches, precision and checkpointing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_same_run
from tests.support.models.pairs import of_plain_layers, pair, small
from tests.support.notes import fell_back, find, has

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


# -- a plain loop (losses on logits, clipping and more: tests/support/matrix) -------------------------


def test_logits_can_be_logged():
    model, reference = pair(of_plain_layers)
    ours, theirs = model(**zoo.batch()), reference(**zoo.batch())
    (ours.loss.backward(), theirs.loss.backward())
    assert torch.allclose(ours.logits.detach(), theirs.logits, atol=1e-5)
    assert (ours.logits.argmax(-1) == zoo.batch()["labels"]).float().mean().item() == (
        theirs.logits.argmax(-1) == zoo.batch()["labels"]
    ).float().mean().item()
    assert torch.allclose(torch.tensor(ours.logits.tolist()), theirs.logits, atol=1e-5)
    assert torch.allclose(ours.logits.cpu().detach()[0, 0], theirs.logits[0, 0], atol=1e-5)
    with torch.no_grad():
        assert ours.logits.softmax(-1).sum().item() == pytest.approx(theirs.logits.softmax(-1).sum().item())


def test_a_view_made_without_gradients_gives_none():
    model, reference = pair(of_plain_layers)

    def run(m):
        out = m(**zoo.batch())
        with torch.no_grad():
            view = out.logits.view(-1, out.logits.shape[-1])
        return out.loss + F.cross_entropy(view * 2, zoo.batch()["labels"].flatten())

    assert_same_run(model, reference, run)


def test_the_report_tells_of_training_in_eval_mode():
    """Nothing is compiled for it."""
    model, reference = pair(of_plain_layers)
    for m in (model, reference):
        m.eval()
    with torch.no_grad():
        model(**zoo.batch())
    assert not find(model, "eval-mode")
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    assert has(model, "eval-mode")
    model.train()(**zoo.batch()).loss.backward()
    model.eval()(**zoo.batch())
    assert not find(model, "eval-mode")


def test_the_report_says_why_logits_are_made_or_the_head_is_not_called():
    model, ids = pair(of_plain_layers)[0], zoo.batch()["input_ids"]
    model.model(ids).last_hidden_state.mean().backward()  # a trainer that multiplies by the head's weight itself
    with torch.no_grad():
        model(ids)  # and generates between its steps
    assert has(model, "head-not-called", reason="loop-computes-loss")
    model(ids).logits.softmax(-1)
    tally = next(m for m in tunecompile.report(model).matches if m.family == "linear_cross_entropy")
    assert has(tally.refused[:1], "logits-computed", subject="softmax")


def test_attentions_are_returned():
    model, reference = pair(lambda: small(attn_implementation="eager"))
    ours, theirs = (m(**zoo.batch(), output_attentions=True).attentions for m in (model, reference))
    assert len(ours) == len(theirs) == 2 and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs))


# -- batches (see tests/support/matrix/batches.py) ------------------------------------------------------------------------------


# -- precision ----------------------------------------------------------------------------------------------------------


def test_autocast():
    model, reference = pair()
    inputs = zoo.batch()

    def run(m):
        with torch.autocast("cpu", torch.bfloat16):
            return m(**inputs).loss

    losses, mine, exact = [], {}, {}
    for m, out in ((model, mine), (reference, exact)):
        loss = run(m)
        loss.backward()
        losses.append(loss.item())
        out.update({n: p.grad.float() for n, p in m.named_parameters()})

    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert max(((mine[n] - g).norm() / g.norm()).item() for n, g in exact.items()) < 0.06
    assert not fell_back(model)


def test_logits_are_read_outside_autocast():
    """As under accelerate: the forward runs under autocast, the loss outside."""
    model, reference = pair(of_plain_layers)
    inputs = zoo.batch()

    def run(m):
        with torch.autocast("cpu", torch.bfloat16):
            logits = m(inputs["input_ids"]).logits
        assert logits.dtype == torch.bfloat16
        return F.cross_entropy(logits.float().flatten(0, 1), inputs["labels"].flatten())

    losses = [run(m) for m in (model, reference)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=5e-3)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (m(inputs["input_ids"]).logits for m in (model, reference))
    assert (ours + 0).dtype == (theirs + 0).dtype == ours.dtype
    assert torch.allclose((ours + 0).float(), theirs.float(), atol=0.02)


# -- what is trained ----------------------------------------------------------------------------------------------------


def test_frozen_layers():
    model, reference = pair(of_plain_layers)
    for m in (model, reference):
        m.model.embed_tokens.requires_grad_(False)
        m.model.layers[0].requires_grad_(False)
        m.lm_head.requires_grad_(False)
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    for m in (model, reference):
        m.model.layers[0].requires_grad_(True)  # gradual unfreezing
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    for m in (model, reference):
        m.requires_grad_(False)
        m.lm_head.requires_grad_(True)
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)


# -- checkpointing from outside -------------------------------------------------------------------------------------------


class Outside(nn.Module):
    """A user's own model around transformers' layers, who checkpoints them by hand."""

    def __init__(self):
        super().__init__()
        base = small()
        self.embed, self.layers, self.norm, self.head = (
            base.model.embed_tokens,
            base.model.layers,
            base.model.norm,
            base.lm_head,
        )
        self.rotary = base.model.rotary_emb

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        tables = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = checkpoint(layer, x, None, None, None, position_embeddings=tables, use_reentrant=False)
            x = x[0] if isinstance(x, tuple) else x
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def test_checkpointing_from_outside():
    model, reference = pair(Outside)
    assert_same_run(model, reference, lambda m: m(**zoo.batch()))

    def with_evaluation(m):
        loss = m(**zoo.batch())
        m.eval()
        with torch.no_grad():
            m(**zoo.batch(seed=2))
        m.train()
        return loss

    assert_same_run(model, reference, with_evaluation)
    assert tunecompile.report(model).compiles > 0 and not fell_back(model)
