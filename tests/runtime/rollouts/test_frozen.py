"""Steps of which nothing but operations is repeated, as a recording on a GPU has them: no number of the host moves."""

import pytest
import torch

from tests.runtime.rollouts.calls import LEFT, QUICK, greedy, pair, prompts
from tests.runtime.rollouts.frozen import Frozen
from tests.support import zoo

pytestmark = pytest.mark.filterwarnings("ignore")


def test_numbers_of_the_host_are_frozen():
    count, total = [0], torch.zeros(3)

    def run():
        count[0] += 1
        total.add_(1)
        return (total.view(3, 1) * count[0],)

    (output,), play = Frozen().record(run, None, None)
    found = []
    for _ in range(3):
        play()
        found.append(output.flatten().tolist())
    assert found == [[1.0] * 3, [2.0] * 3, [3.0] * 3] and count == [1]


@pytest.mark.parametrize("ask", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: bool((x > 0).all())])
def test_questions_of_the_host_are_refused(ask):
    with pytest.raises(RuntimeError, match="not permitted"):
        Frozen().record(lambda: (ask(torch.ones(3)),), None, None)


@pytest.mark.parametrize(
    "family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in zoo.NAMES if f not in LEFT]
)
def test_tokens_of_each_family(family):
    """With padding on the left and without, windows shorter than the prompt, and rows that end early. Weights are large, so
    that a wrong mask or position changes tokens."""
    model, ours, loop = pair(family, initializer_range=0.15)
    loop.recorder = Frozen()
    whole = {"input_ids": prompts(1)["input_ids"] + torch.arange(3)[:, None]}
    for inputs, options in ((prompts(), {"max_new_tokens": 30, "eos_token_id": None}), (prompts(), {}), (whole, {})):
        settings = greedy(**options)
        assert torch.equal(ours.generate(**inputs, **settings), model.generate(**inputs, **settings)), (inputs, options)
        assert not options or loop.recorder.replays == 28
    assert loop.refused is None and loop.calls == 3 and not loop.left


def test_rows_of_one_prompt_are_computed_once(monkeypatch):
    """As GRPO has them, and by `num_return_sequences`; an equal row elsewhere is computed by itself. The row of four tokens
    is not computed with those of eleven.
    """
    model, ours, _ = pair("qwen3_5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    counts, forward = [], type(ours)._prefill
    monkeypatch.setattr(
        type(ours),
        "_prefill",
        lambda m, ids, *more, **named: counts.append(len(ids)) or forward(m, ids, *more, **named),
    )
    inputs = {name: value[[0, 0, 0, 1, 1, 2, 0]] for name, value in prompts().items()}
    expected = model.generate(**inputs, **greedy())
    counts.clear()
    assert torch.equal(ours.generate(**inputs, **greedy()), expected) and counts == [3, 1]
    torch.manual_seed(0)
    drawn = ours.generate(**prompts(), **greedy(do_sample=True, num_return_sequences=3, eos_token_id=None))
    assert counts == [3, 1, 2, 1] and drawn.shape[0] == 9 and len({tuple(row.tolist()) for row in drawn}) == 9


def test_a_window_that_fills_while_tokens_are_generated():
    model, ours, loop = pair("mistral", initializer_range=0.15, sliding_window=20)
    loop.recorder = Frozen()
    settings = greedy(max_new_tokens=30, eos_token_id=None)
    assert torch.equal(ours.generate(**prompts(), **settings), model.generate(**prompts(), **settings))
    assert loop.recorder.replays == 28
