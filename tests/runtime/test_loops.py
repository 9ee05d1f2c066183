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
from tests.support.notes import codes, fell_back, find, has

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


def write_into_a_view(logits, labels):
    logits.view(-1, logits.shape[-1])[:, 200:] = -100.0
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(max=199))


def write_into_slices(logits, labels):
    logits.float()[..., :-1, :].mul_(0.5)
    logits[0].mul_(2)
    return F.cross_entropy(logits[..., :-1, :].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))


def write_after_views_and_copies(logits, labels):
    view, copies = logits.view(-1, logits.shape[-1]), (logits.clone(), logits * 2)
    logits[..., 200:] = -5.0
    return F.cross_entropy(view, labels.flatten()) + sum(
        F.cross_entropy(c.flatten(0, 1), labels.flatten()) for c in copies
    )


@pytest.mark.parametrize(
    "write",
    [
        write_after_views_and_copies,
        *(pytest.param(write, marks=pytest.mark.slow) for write in (write_into_a_view, write_into_slices)),
    ],
)
def test_writing_into_logits_reaches_all_that_share_their_memory(write):
    model, reference = pair(of_plain_layers)
    inputs = zoo.batch()
    labels = inputs["labels"].clamp(min=0)
    assert_same_run(model, reference, lambda m: write(m(inputs["input_ids"]).logits, labels))


@pytest.mark.parametrize("reading", [torch.no_grad, pytest.param(torch.inference_mode, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "part",
    [pytest.param(lambda logits: logits, marks=pytest.mark.slow), lambda logits: logits[:, :-1]],
    ids=["all", "a slice"],
)
def test_metrics_are_read_before_the_loss(reading, part):
    """Without gradients, as a user counts hits: the loss that comes later has its gradients all the same."""
    model, reference = pair(of_plain_layers)
    inputs, seen = zoo.batch(), []

    def run(m):
        logits = part(m(inputs["input_ids"]).logits)
        with reading():
            seen.append(logits.argmax(-1).sum().item())
        return F.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, : logits.shape[1]].flatten())

    assert_same_run(model, reference, run)
    assert seen[0] == seen[1]
    tally = next(m for m in tunecompile.report(model).matches if m.family == "linear_cross_entropy")
    assert tally.rewritten or codes(tally.refused[:1]) == ["logits-used-before-loss"]


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


@pytest.mark.parametrize("write", ["labels", pytest.param("own", marks=pytest.mark.slow)])
def test_a_graph_that_is_retained(write):
    """Not in the first step, so that the backward is compiled for one that is not."""

    def run(m):
        loss = (
            m(**zoo.batch()).loss
            if write == "labels"
            else F.cross_entropy(m(zoo.batch()["input_ids"]).logits.flatten(0, 1), zoo.batch()["labels"].flatten())
        )
        if steps:
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
        return loss

    model, reference = pair(of_plain_layers)
    for steps in range(2):
        assert_same_run(model, reference, run)


def test_forward_without_gradients_between_steps():
    model, reference = pair(of_plain_layers)
    for seed in range(2):
        assert_same_run(model, reference, lambda m: m(**zoo.batch(seed=seed)).loss)
        with torch.no_grad():
            assert model(**zoo.batch(seed=seed)).loss.item() == pytest.approx(
                reference(**zoo.batch(seed=seed)).loss.item(), rel=1e-5
            )
    assert tunecompile.report(model).compiles == 1


def test_attentions_are_returned():
    model, reference = pair(lambda: small(attn_implementation="eager"))
    ours, theirs = (m(**zoo.batch(), output_attentions=True).attentions for m in (model, reference))
    assert len(ours) == len(theirs) == 2 and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs))


# -- batches (see tests/support/matrix/batches.py) ------------------------------------------------------------------------------


def test_no_label_at_all():
    model, reference = pair(of_plain_layers)
    masked = zoo.batch()
    masked["labels"].fill_(-100)
    assert model(**masked).loss.isnan() and reference(**masked).loss.isnan() and not fell_back(model)


@pytest.mark.slow
def test_a_length_that_equals_another_size_by_chance():
    """16 is the head's size too, 64 the hidden size: neither becomes symbolic for good, nor the length fixed."""
    model, reference = pair()
    for rows, length in ((2, 16), (4, 16), (2, 64), (2, 16), (3, 17), (4, 30), (16, 16), (5, 9)):
        inputs = zoo.batch(rows=rows, length=length)
        assert_same_run(model, reference, lambda m: m(**inputs).loss)
    assert tunecompile.report(model).compiles <= 4 and not fell_back(model)


# -- precision ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("params", [torch.float32, pytest.param("same", marks=pytest.mark.slow)])
def test_autocast(dtype, params):
    model, reference = pair(lambda: small() if params == torch.float32 else small().to(dtype))
    inputs = zoo.batch()

    def run(m):
        with torch.autocast("cpu", dtype):
            return m(**inputs).loss

    losses, mine, exact = [], {}, {}
    for m, out in ((model, mine), (reference, exact)):
        loss = run(m)
        loss.backward()
        losses.append(loss.item())
        out.update({n: p.grad.float() for n, p in m.named_parameters()})
    limit = 0.06 if dtype == torch.bfloat16 else 0.02
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert max(((mine[n] - g).norm() / g.norm()).item() for n, g in exact.items()) < limit
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
    model, reference = pair()
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


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_dropout_by_seed(checkpointing):
    def build():
        return zoo.adapt(small(attention_dropout=0.1), lora_dropout=0.2, target_modules=["q_proj", "v_proj"])

    def losses(seed: int, m: nn.Module) -> list[float]:
        torch.manual_seed(seed)
        return [zoo.step(m, zoo.batch(seed=s))[0].item() for s in range(2)]

    model, reference = pair(build)
    if checkpointing is not None:
        for m in (model, reference):
            m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    first = losses(1, model)
    assert losses(1, model) == first != losses(2, model)
    assert first == pytest.approx(losses(1, reference), rel=0.05)
    true_slope(model)


def true_slope(model: nn.Module) -> None:
    """The gradient is that of the very loss that was returned: the recomputation draws the masks of the forward."""
    inputs = zoo.batch(seed=3)
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def loss() -> torch.Tensor:
        torch.manual_seed(9)
        return model(**inputs).loss

    model.zero_grad(set_to_none=True)
    loss().backward()
    gradients = {n: p.grad.clone() for n, p in weights.items()}
    norm = sum(g.square().sum() for g in gradients.values()).sqrt()
    ends, reach = [], 3e-2
    for sign in (1, -2):
        with torch.no_grad():
            for n, p in weights.items():
                p.add_(gradients[n], alpha=float(sign * reach / norm))
        ends.append(loss().item())
    with torch.no_grad():
        for n, p in weights.items():
            p.add_(gradients[n], alpha=float(reach / norm))
    assert (ends[0] - ends[1]) / (2 * reach) == pytest.approx(norm.item(), rel=2e-2)


# -- checkpointing from outside -------------------------------------------------------------------------------------------


class Outside(nn.Module):
    """A user's own model around transformers' layers, who checkpoints them by hand."""

    def __init__(self, use_reentrant: bool, dropout: float = 0.0):
        super().__init__()
        base = small(attention_dropout=dropout)
        self.embed, self.layers, self.norm, self.head = (
            base.model.embed_tokens,
            base.model.layers,
            base.model.norm,
            base.lm_head,
        )
        self.rotary, self.use_reentrant = base.model.rotary_emb, use_reentrant

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        tables = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = (
                checkpoint(layer, x, None, None, None, position_embeddings=tables, use_reentrant=False)
                if not self.use_reentrant
                else checkpoint(lambda h, layer=layer: layer(h, position_embeddings=tables), x, use_reentrant=True)
            )
            x = x[0] if isinstance(x, tuple) else x
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("use_reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpointing_from_outside(use_reentrant):
    model, reference = pair(lambda: Outside(use_reentrant))
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


@pytest.mark.slow
def test_checkpointing_the_whole_model_from_outside():
    for use_reentrant in (False, True):
        model, reference = pair()
        assert_same_run(
            model,
            reference,
            lambda m: checkpoint(
                lambda x: m(inputs_embeds=x).logits.square().mean(),
                torch.randn(2, 8, 64, requires_grad=True),
                use_reentrant=use_reentrant,
            ),
        )
