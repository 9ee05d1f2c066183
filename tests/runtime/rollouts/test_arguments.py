"""Arguments of `generate` in each way in which it takes them: the tokens are those of transformers' own loop."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, StoppingCriteria

from tests.runtime.rollouts import calls
from tests.runtime.rollouts.calls import greedy, prompts

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.shared_graphs]


@pytest.fixture(scope="module")
def llama():
    return calls.llama()


def compare(llama, call) -> set[tuple[str, str]]:
    """Why transformers' own loop ran a call, which has the tokens of a model that is not optimized."""
    model, ours, loop = llama
    loop.left.clear()
    calls = loop.calls
    assert torch.equal(call(ours), call(model))
    assert loop.calls == calls + (not loop.left)
    return {(why.code, why.subject) for why in loop.left}


@pytest.mark.parametrize(
    ("options", "why"), [({}, set()), ({"num_beams": 2}, {("generation-mode", "beam_search")})], ids=["greedy", "beams"]
)
def test_a_configuration_given_by_position(llama, options, why):
    mask, config = prompts()["attention_mask"], GenerationConfig(**greedy(**options))
    assert compare(llama, lambda m: m.generate(prompts()["input_ids"], config, attention_mask=mask)) == why


def test_ranks_that_need_not_wait_for_each_other(llama):
    """`Seq2SeqTrainer` gives the argument in any case."""
    assert compare(llama, lambda m: m.generate(**prompts(), synced_gpus=False, **greedy())) == set()


def test_prompts_of_embeddings(llama):
    """Their tokens are counted from behind the prompt, and their cache is not."""
    inputs = prompts(length=60)
    mask = inputs["attention_mask"]

    def call(model):
        embedded = model.get_input_embeddings()(inputs["input_ids"])
        return model.generate(inputs_embeds=embedded, attention_mask=mask, **greedy())

    assert compare(llama, call) == {("generation-argument", "inputs_embeds")}


def test_the_assistant_of_another_model(llama):
    def call(assistant):
        return llama[0].generate(prompts(1)["input_ids"], assistant_model=assistant, **greedy())

    model, ours, loop = llama
    loop.left.clear()
    assert torch.equal(call(ours), call(model))
    assert {why.subject for why in loop.left} == {"is_assistant"}


def test_a_criterion_that_answers_for_all_rows(llama):
    class Long(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return input_ids.shape[1] > 15

    assert compare(llama, lambda m: m.generate(**prompts(), stopping_criteria=[Long()], **greedy())) == set()


def test_processors_of_the_callers_are_called_for_each_token_alone(llama):
    """And for none after the last row has ended: one that walks a grammar would have no state for it."""
    counts = []

    class Flat(LogitsProcessor):
        def __call__(self, input_ids, scores):
            counts[-1] += 1
            last = input_ids.view(-1)[input_ids.shape[1] - 1 :: input_ids.shape[1]]
            scores[:, 7 if input_ids.shape[1] == 17 else 8] += 1000.0
            return scores.scatter(1, last[:, None], -1000.0)

    def call(model):
        counts.append(0)
        return model.generate(**prompts(), logits_processor=[Flat()], **greedy(max_new_tokens=40))

    assert compare(llama, call) == set()
    assert counts == [7, 7]


def test_a_cache_that_the_host_holds(llama, monkeypatch):
    """Its class is that of a cache on the device."""
    monkeypatch.setattr("transformers.generation.utils.DynamicCache", lambda config, **_: DynamicCache(config=config))
    assert compare(llama, lambda m: m.generate(**prompts(), **greedy(cache_implementation="offloaded"))) == {
        ("generation-cache", "offloaded")
    }
