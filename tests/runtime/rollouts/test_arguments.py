"""Arguments of `generate` in each way in which it takes them: the tokens are those of transformers' own loop."""

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria

from tests.runtime.rollouts.test_generate import greedy, pair, prompts

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def llama():
    return pair(initializer_range=0.2)


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


def test_a_criterion_that_answers_for_all_rows(llama):
    class Long(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return input_ids.shape[1] > 15

    assert compare(llama, lambda m: m.generate(**prompts(), stopping_criteria=[Long()], **greedy())) == set()
