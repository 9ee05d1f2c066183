"""Evaluations run by the code of training steps, without a backward, and make no logits unless somebody reads them."""

import copy
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tunecompile
from tests.support import zoo
from tests.support.batches import packed, padded
from tests.support.models.pairs import adapted_layers, attending, of_plain_layers, optimized, pair, token_wise
from tests.support.notes import EAGER, find, has
from tunecompile.integrations.transformers import gives_cache
from tunecompile.runtime.loss_head.deferred import LazyTensor

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = 256  #: of the small models


class Logits(TorchDispatchMode):
    """Counts tensors [B, T, V] that have values. Inside, Dynamo traces nothing: layers run op by op."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        found = (each for each in tree_leaves(made) if isinstance(each, torch.Tensor))
        self.count += sum(each.dim() == 3 and each.shape[-1] == WORDS and not each.is_meta for each in found)
        return made


def graphs(model: torch.nn.Module) -> dict[str, int]:
    """By what stands in the place of a plan."""
    found: Counter[str] = Counter()
    for key, variant in (item for region in model._tunecompile.regions for item in region.variants.items()):
        found[key[0] if isinstance(key[0], str) else "training"] += variant.graphs
    return found


def in_eval(*models: torch.nn.Module) -> None:
    for model in models:
        model.eval()


def cache_of(output):
    """Under the name that the installed version has."""
    return next(value for name in ("cache", "past_key_values") if (value := getattr(output, name, None)) is not None)


def test_a_loss_as_eager_has_it_and_no_logits(made):
    """Dropout is off, padding is left out, and one graph serves all sizes."""
    pytest.importorskip("peft")
    model, reference = pair(lambda: zoo.adapt(attending(attention_dropout=0.5), lora_dropout=0.5))
    in_eval(model, reference)
    for seed, rows, length in ((1, 4, 20), (2, 3, 17), (3, 6, 9)):
        inputs = padded(rows, length, seed=seed, side="left" if seed == 2 else "right")
        with torch.inference_mode():
            loss = model(**inputs).loss
            assert loss.item() == pytest.approx(reference(**inputs).loss.item(), rel=1e-6)
        assert not made and not loss.requires_grad
    assert graphs(model) == {"evaluation": 1}
    assert has(model, "evaluation-compiled", count=3) and not find(model, *EAGER)


@pytest.mark.parametrize("reading", [torch.no_grad, torch.inference_mode])
def test_no_operation_makes_logits(reading):
    model, reference = pair(of_plain_layers)
    in_eval(model, reference)
    counts = []
    for m in (model, reference):
        with reading(), Logits() as logits:
            output = m(**zoo.batch())
            counts.append(logits.count)
            output.logits + 1
        assert logits.count > counts[-1]
    assert counts[0] == 0 < counts[1]


def test_logits_that_are_read_are_real_at_padding_too(made):
    """After the call, and of an earlier one. From then on evaluations keep their padding; training steps do not."""
    model, reference = pair(token_wise)
    in_eval(model, reference)
    batches = [padded(seed=seed) for seed in range(3)]
    with torch.inference_mode():
        ours = [model(**inputs) for inputs in batches]
        theirs = [reference(**inputs) for inputs in batches]
    model.train()
    zoo.step(model, padded(seed=7))
    assert not made and all(isinstance(each.logits, LazyTensor) for each in ours)
    model.load_state_dict(reference.state_dict())
    for mine, exact in zip(ours, theirs):
        assert torch.allclose(mine.logits, exact.logits, atol=1e-5)
        assert torch.equal(mine.logits.argmax(-1), exact.logits.argmax(-1))
    assert len(made) == 3 and model.training and all(module.training for module in model.modules())
    for mine in ours:
        with torch.inference_mode():
            mine.logits[..., 3] = 9.0
            assert (mine.logits[..., 3] == 9).all(), "what somebody wrote is there"
    evaluation, padding = model._tunecompile.evaluations[0], model._tunecompile.paddings[0]
    assert evaluation.refused.code == "logits-read" and padding.refused is None
    in_eval(model)
    with torch.inference_mode():
        model(**batches[0])
        assert not evaluation.flat
        assert torch.allclose(model(**batches[1]).logits, theirs[1].logits, atol=1e-5)
    model.train()
    zoo.step(model, padded(seed=7))
    assert has(model, "padding-removed", count=2)


def test_no_label_at_all():
    model, reference = pair(of_plain_layers)
    in_eval(model, reference)
    inputs = zoo.batch()
    inputs["labels"].fill_(-100)
    with torch.no_grad():
        assert model(**inputs).loss.isnan() and reference(**inputs).loss.isnan()


# -- caches and generation ------------------------------------------------------------------------------------------------


def test_a_cache_that_the_model_makes_by_default_is_there_when_it_is_read():
    """And logits are, of batches without padding. In a tuple it is at its place; an owner that returns a tuple itself
    would have none there."""
    model, reference = pair(attending)
    in_eval(model, reference)
    for inputs in (padded(), packed((7, 9)), zoo.batch()):
        with torch.inference_mode():
            ours, theirs = model(**inputs), reference(**inputs)
        assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
        assert list(ours.keys()) == list(theirs.keys())
        assert_same_cache(cache_of(ours), cache_of(theirs), inputs["input_ids"].shape[1])
        with torch.no_grad():
            again = cache_of(model(**inputs))
        assert copy.deepcopy(again).get_seq_length() == inputs["input_ids"].shape[1]
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        ours, theirs = (m(**zoo.batch(), return_dict=False) for m in (model, reference))
    assert len(ours) == len(theirs) == 3 and ours[0].item() == pytest.approx(theirs[0].item(), rel=1e-6)
    assert torch.equal(ours[2].layers[0].keys, theirs[2].layers[0].keys) and graphs(model) == {"evaluation": 2}
    evaluation = model._tunecompile.evaluations[0]
    assert evaluation._why_left((), {"return_dict": False}).code == "cache-in-tuple"
    assert evaluation._why_left((), {"return_dict": False, "use_cache": False}) is None


def assert_same_cache(mine, exact, length: int) -> None:
    assert not hasattr(mine, "dtype") and "layers" not in vars(mine), (
        "whoever asks whether it is a tensor reads nothing"
    )
    assert isinstance(mine, type(exact)) and gives_cache({"past_key_values": mine})
    assert mine.get_seq_length() == exact.get_seq_length() == length and type(mine) is type(exact)
    for one, other in zip(mine.layers, exact.layers):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
    assert copy.deepcopy(mine).get_seq_length() == length


def test_a_cache_of_an_evaluation_that_is_over_tells_of_new_weights(caplog):
    model, _ = pair(of_plain_layers)
    in_eval(model)
    with torch.no_grad():
        output = model(**zoo.batch())
        next(model.parameters()).add_(1)
    assert not caplog.records
    cache_of(output).get_seq_length()
    assert "cache" in caplog.text


def test_who_requests_a_cache_gets_the_models_own_code():
    model, reference = pair(attending)
    in_eval(model, reference)
    with torch.no_grad():
        ours, theirs = (m(**zoo.batch(), use_cache=True) for m in (model, reference))
    assert torch.equal(ours.loss, theirs.loss) and torch.equal(ours.logits, theirs.logits) and not graphs(model)
    assert torch.equal(cache_of(ours).layers[0].keys, cache_of(theirs).layers[0].keys)
    assert has(model, "evaluation-left", reason="cache-used")


def test_what_is_for_no_loss_stays_as_it_is():
    """Generation, before and after an evaluation and a step, and calls without labels."""
    model, reference = pair(attending)
    ids = zoo.batch()["input_ids"]

    def outside() -> None:
        in_eval(model, reference)
        given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)
        for caches in (True, False):
            assert torch.equal(*(m.generate(ids, use_cache=caches, **given) for m in (model, reference)))
        with torch.no_grad():
            ours, theirs = (m(ids) for m in (model, reference))
        assert torch.equal(ours.logits, theirs.logits) and type(ours.logits) is torch.Tensor
        assert torch.equal(cache_of(ours).layers[0].keys, cache_of(theirs).layers[0].keys)

    outside()
    assert not graphs(model)
    with torch.no_grad():
        model(**zoo.batch())
    outside()
    assert graphs(model) == {"evaluation": 1}
    model.train()(**padded()).loss.backward()
    outside()
    assert not find(model, "evaluation-left")


# -- between steps --------------------------------------------------------------------------------------------------------


def losses(model: torch.nn.Module, evaluated: bool, rows: tuple = (padded, zoo.batch)) -> list[float]:
    """Of a training with dropout, with evaluations of other sizes before, between and inside of its steps, or without."""

    def evaluate(seed: int) -> None:
        model.eval()
        with torch.no_grad():
            for make in (padded, zoo.batch):
                output = model(**make(rows=2 + seed % 3, length=9 + seed, seed=seed))
            output.logits.argmax(-1), model(**padded(seed=seed)).logits.sum()
        model.train()

    optimizer, found = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), []
    torch.manual_seed(3)
    for step in range(5):
        if evaluated and step != 1:
            evaluate(step)
        loss = model(**rows[step % len(rows)](rows=4 - step % 2, length=20 - step, seed=step)).loss
        if evaluated and step:
            evaluate(10 + step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_steps_between_evaluations_are_the_same_to_the_bit():
    """With dropout of adapters."""
    pytest.importorskip("peft")
    plain = adapted_layers(lora_dropout=0.2)
    alone, between = (optimized(copy.deepcopy(plain)) for _ in range(2))
    assert losses(alone, False) == losses(between, True)
    assert graphs(between)["training"] == graphs(alone)["training"] and graphs(between)["evaluation"] <= 3
    told = [find(m, "padding-removed", "whole-by-padded", "padding-kept", "sizes-kept") for m in (alone, between)]
    assert told[0] == told[1] and not find(between, *EAGER)


def test_memory_of_evaluations_is_no_steps():
    model, _ = pair(of_plain_layers, memory="1GiB")
    zoo.step(model, zoo.batch())
    (budget,) = model._tunecompile.step.budgets
    steps = budget.progress.steps
    in_eval(model)
    with torch.no_grad():
        model(**zoo.batch())
    assert budget.progress.paused and budget.progress.steps == steps
    zoo.step(model.train(), zoo.batch())
    assert not budget.progress.paused and budget.progress.steps == steps + 1


def test_nothing_is_compiled_before_the_first_step_is_verified():
    model, reference = pair(of_plain_layers, verify=True)
    for verified in (False, True):
        in_eval(model, reference)
        with torch.no_grad():
            ours, theirs = (m(**zoo.batch()).loss.item() for m in (model, reference))
        assert ours == pytest.approx(theirs, rel=1e-6) and bool(graphs(model)["evaluation"]) is verified
        for m in (model, reference):
            zoo.step(m.train(), zoo.batch())
    assert has(model, "evaluation-left", reason="not-verified-yet")


def test_engines_take_a_model_after_its_first_evaluation(monkeypatch):
    """What surrounds a layer is looked at again when the training begins."""
    model, _ = pair(of_plain_layers)
    in_eval(model)
    with torch.no_grad():
        model(**zoo.batch())
    slots = model._tunecompile.slots
    seen = [slot.inside for slot in slots]
    zoo.step(model.train(), zoo.batch())
    assert all(slot.inside is not before for slot, before in zip(slots, seen))
    seen = [slot.inside for slot in slots]
    zoo.step(model, zoo.batch())
    assert [slot.inside for slot in slots] == seen


def test_logits_of_a_trained_head_that_are_read_when_it_has_changed(caplog):
    """As a training step's: the user is told."""
    model, _ = pair(of_plain_layers)
    in_eval(model)
    with torch.no_grad():
        output = model(**zoo.batch())
        model.lm_head.weight.add_(1)
        output.logits.sum()
        assert type(model(**zoo.batch()).logits) is torch.Tensor
    assert "logits" in caplog.text and has(model._tunecompile.heads[0].tally.refused, "logits-read-late")


def test_after_restore_evaluation_is_the_models_own():
    model, reference = pair(of_plain_layers)
    in_eval(model, reference)
    with torch.no_grad():
        output = model(**zoo.batch())
        tunecompile.restore(model)
        assert torch.equal(output.logits, reference(**zoo.batch()).logits)
        assert torch.equal(model(**zoo.batch()).logits, reference(**zoo.batch()).logits)
