"""`generate` of an optimized model gives the tokens of transformers' own loop, from recorded steps."""

import copy
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import tunecompile
from tests.runtime.rollouts import calls
from tests.runtime.rollouts.calls import LEFT, greedy, made, pair, prompts
from tests.runtime.rollouts.recorder import loop_of
from tests.support import zoo
from tunecompile.runtime.model_state import state_of
from tunecompile.runtime.rollouts import prompt

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.shared_graphs]


@pytest.fixture(scope="module")
def llama():
    return calls.llama()


@pytest.mark.parametrize("family", LEFT)
def test_families_that_are_left(family):
    model, ours, loop = pair(family)
    for inputs in (prompts(), {"input_ids": prompts(1)["input_ids"]}):
        assert torch.equal(ours.generate(**inputs, **greedy()), model.generate(**inputs, **greedy()))
    assert loop.calls == 0 and loop.left


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 12},
        {"min_length": 18},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [5, 60, 61]},
        {"eos_token_id": None},
        {"max_time": 100.0},
        {"num_return_sequences": 1, "forced_eos_token_id": 9},
    ],
    ids=lambda options: "-".join(options),
)
def test_scores_and_criteria(llama, options):
    model, ours, loop = llama
    calls = loop.calls
    expected = model.generate(**prompts(), **greedy(**options))
    assert torch.equal(ours.generate(**prompts(), **greedy(**options)), expected)
    assert loop.calls == calls + 1, loop.left


def test_the_end_of_all_rows_ends_the_call(llama):
    """At the token that HF's loop ends at, though the host asks every sixteen tokens."""
    model, ours, _ = llama
    first = model.generate(**prompts(), **greedy(max_new_tokens=40, eos_token_id=None))[:, 11:]
    ends = [first[0, 18].item(), first[1, 3].item(), first[2, 5].item()]
    settings = greedy(max_new_tokens=40, eos_token_id=ends)
    expected = model.generate(**prompts(), **settings)
    assert expected.shape[1] < 51 and torch.equal(ours.generate(**prompts(), **settings), expected)


def test_outputs_as_a_dictionary(llama):
    model, ours, loop = llama
    settings = greedy(return_dict_in_generate=True, output_scores=True, output_logits=True, min_new_tokens=4)
    expected, found = (each.generate(**prompts(), **settings) for each in (model, ours))
    assert torch.equal(found.sequences, expected.sequences) and len(found.scores) == len(expected.scores)
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(getattr(found, name)), torch.stack(getattr(expected, name)))
    theirs, mine = (each.past_key_values for each in (expected, found))
    assert type(mine) is type(theirs) and mine.get_seq_length() == theirs.get_seq_length()
    torch.testing.assert_close(mine.layers[1].keys, theirs.layers[1].keys)


def test_log_probs_are_those_of_a_forward():
    """Of drawn tokens, as a trainer scores them: ratios of GRPO begin at 1."""
    model, ours, _ = pair("gemma2")
    torch.manual_seed(0)
    settings = greedy(do_sample=True, top_k=0, return_dict_in_generate=True, output_logits=True, eos_token_id=None)
    drawn = ours.generate(**prompts(), **settings)
    chosen = drawn.sequences[:, 11:, None]
    mask = F.pad(prompts()["attention_mask"], (0, 20), value=1)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        scored = model(drawn.sequences, attention_mask=mask, position_ids=places).logits[:, 10:-1]
    then = torch.stack(drawn.logits, 1)
    for found, right in ((then, scored), *(([x.log_softmax(-1).gather(-1, chosen) for x in (then, scored)],))):
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


def test_samples_have_the_distribution_of_the_scores(llama):
    """The first and the second token, by counts: chi-squared over four bins of equal probability."""
    _, ours, loop = llama
    torch.manual_seed(0)
    rows = prompts(1)["input_ids"].repeat(2000, 1)
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 12, "top_p": 0.95, "pad_token_id": 0}
    found = ours.generate(input_ids=rows, max_new_tokens=2, eos_token_id=None, **settings)[:, 11:]
    with torch.no_grad():
        logits = ours(input_ids=rows[:1]).logits[0, -1] / 0.7
    best = logits.topk(12)
    shares = best.values.softmax(-1)
    kept = shares.cumsum(-1) - shares < 0.95
    shares = (shares * kept) / (shares * kept).sum()
    counts = (found[:, :1] == best.indices).sum(0)
    assert counts.sum() == 2000, "a token was drawn that is not among the best"
    wanted = 2000 * shares[kept]
    assert ((counts[kept] - wanted) ** 2 / wanted).sum() < 40, "the distribution is another one"
    assert len(found[:, 1].unique()) > 3
    torch.manual_seed(1)
    again = ours.generate(input_ids=rows, max_new_tokens=2, eos_token_id=None, **settings)[:, 11:]
    assert not torch.equal(again, found)


def test_scores_that_are_no_numbers():
    """They end in torch's error, and not in some token."""
    _, ours, _ = pair()
    settings = greedy(do_sample=True, top_k=5)
    ours.generate(**prompts(), **settings)
    with torch.no_grad():
        ours.lm_head.weight[17] = torch.nan
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        ours.generate(**prompts(), **settings)


def test_the_weights_of_the_last_step():
    """Adapters that an optimizer has changed in place, or that are switched off, are those of the next call."""
    model = zoo.adapt(made()).eval()
    ours = tunecompile.optimize(copy.deepcopy(model), executor="eager")
    loop = loop_of(ours)
    for scale in (0.0, 0.3, -0.3):
        for each in (model, ours):
            for name, parameter in each.named_parameters():
                if "lora_B" in name:
                    parameter.data.fill_(scale).mul_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        assert torch.equal(ours.generate(**prompts(), **greedy()), model.generate(**prompts(), **greedy()))
    with model.disable_adapter(), ours.disable_adapter():
        without = model.generate(**prompts(), **greedy())
        assert torch.equal(ours.generate(**prompts(), **greedy()), without)
    assert not torch.equal(without, model.generate(**prompts(), **greedy())) and loop.calls == 4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_with_generated_code(family):
    """By Inductor, of two lengths of the cache with one graph."""
    model = zoo.make(family, num_hidden_layers=2).float().eval()
    ours = tunecompile.optimize(copy.deepcopy(model))
    loop = loop_of(ours)
    for tokens in (20, 80):
        settings = greedy(max_new_tokens=tokens, eos_token_id=None)
        assert torch.equal(ours.generate(**prompts(), **settings), model.generate(**prompts(), **settings))
    assert loop.calls == 2 and all(
        v.graphs == 1 and not v.eager for r in state_of(ours).regions for v in r.variants.values()
    )


def test_few_numbers_of_rows_are_compiled():
    """Further rows are added to a power of two, and nobody sees them."""
    model, ours, _ = pair()
    settings = greedy(return_dict_in_generate=True, output_scores=True)
    for count in (5, 7, 8, 6):
        inputs = {name: value[torch.arange(count) % 3] for name, value in prompts().items()}
        expected, found = (each.generate(**inputs, **settings) for each in (model, ours))
        assert torch.equal(found.sequences, expected.sequences) and found.scores[1].shape[0] == count
        assert found.past_key_values.layers[0].keys.shape == expected.past_key_values.layers[0].keys.shape
    (region,) = state_of(ours).regions
    assert [variant.graphs for variant in region.variants.values()] == [1]
    assert prompt.rounded(torch.ones(70, 2, dtype=torch.int64), {})[0].shape[0] == 96


def test_rows_are_constants(monkeypatch, tmp_path):
    """Products of few rows have none of their own for a number of rows that is a symbol."""
    torch._dynamo.reset()
    monkeypatch.setenv("TUNECOMPILE_DUMP", str(tmp_path))
    _, ours, _ = pair()
    for count in (8, 4, 2):
        inputs = {name: value[torch.arange(count) % 3] for name, value in prompts().items()}
        ours.generate(**inputs, **greedy(max_new_tokens=3))
    graphs = [file.read_text() for file in sorted(tmp_path.glob("*recognize.before.py"))]
    assert [int(re.search(r'"f32\[(\d+), 1, \d+\]', graph)[1]) for graph in graphs] == [8, 4, 2]


def test_heads_as_wide_as_the_cache_is_long():
    """What is a symbol in the graph is the length of the cache alone."""
    torch._dynamo.reset()
    model, ours, _ = pair(head_dim=64, hidden_size=64)
    for tokens in (20, 80):
        settings = greedy(max_new_tokens=tokens, eos_token_id=None)
        assert torch.equal(ours.generate(**prompts(), **settings), model.generate(**prompts(), **settings))
    (region,) = state_of(ours).regions
    assert [variant.graphs for variant in region.variants.values()] == [1]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"num_beams": 2}, "generation-mode"),
        ({"cache_implementation": "static"}, "generation-cache"),
        ({"use_cache": False}, "generation-cache"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "generation-argument"),
    ],
)
def test_what_runs_by_transformers_loop(llama, options, code):
    model, ours, loop = llama
    calls = loop.calls
    expected, found = (each.generate(**prompts(), **greedy(**options)) for each in (model, ours))
    expected, found = (getattr(each, "sequences", each) for each in (expected, found))
    assert torch.equal(found, expected) and loop.calls == calls
    assert code in {why.code for why in loop.left}
    assert any(each.code == "generation-left" for each in tunecompile.report(ours).notes)


def test_steps_that_cannot_be_recorded_run_as_they_are():
    model, ours, loop = pair()

    def record(run, pool, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    loop.recorder.record = record
    for _ in range(2):
        assert torch.equal(ours.generate(**prompts(), **greedy()), model.generate(**prompts(), **greedy()))
    assert loop.refused.code == "generation-not-recorded" and loop.calls == 2


def no_room(*_args, **_kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_out_of_memory(monkeypatch, caplog):
    """A recording without room is none for one call; a call without room says how large its cache is."""
    model, ours, loop = pair()
    with monkeypatch.context() as changed:
        changed.setattr(loop.recorder, "record", no_room)
        assert torch.equal(ours.generate(**prompts(), **greedy()), model.generate(**prompts(), **greedy()))
    ours.generate(**prompts(), **greedy())
    assert loop.refused is None and loop.recorder.records == 1
    monkeypatch.setattr(prompt, "fill", no_room)
    with caplog.at_level("WARNING", "tunecompile"), pytest.raises(torch.OutOfMemoryError):
        ours.generate(**prompts(), **greedy())
    assert "3 rows of 31 tokens" in caplog.text and "fewer rows" in caplog.text


def test_room_beside_training(monkeypatch, caplog):
    """What training steps hold is given back for a cache without room; a criterion of the caller's is called once."""
    model, ours, _ = pair()
    own, forgotten, calls = prompt.fill, [], []
    state = state_of(ours)
    monkeypatch.setattr(state.replays, "forget", lambda: forgotten.append(True))
    monkeypatch.setattr(prompt, "fill", lambda *args: own(*args) if forgotten else no_room())
    assert torch.equal(ours.generate(**prompts(), **greedy()), model.generate(**prompts(), **greedy()))
    assert forgotten == [True] and "3 rows of 31 tokens" in caplog.text
    assert "generation-made-room" in {each.code for each in tunecompile.report(ours).notes}
    monkeypatch.setattr(prompt, "fill", lambda *args: calls.append(True) or no_room())
    for settings, count in ((greedy(no_repeat_ngram_size=2), 1), (greedy(), 3)):
        with pytest.raises(torch.OutOfMemoryError):
            ours.generate(**prompts(), **settings)
        assert len(calls) == count


def test_copies_and_restored_models_have_their_own_generate():
    _, ours, loop = pair()
    copied = copy.deepcopy(ours)
    copied.generate(**prompts(), **greedy())
    assert loop.calls == 0
    tunecompile.restore(ours)
    ours.generate(**prompts(), **greedy())
    assert loop.calls == 0 and "generate" not in vars(ours)


def test_switched_off():
    model = tunecompile.optimize(zoo.make("llama").float(), generate=False)
    assert "generate" not in vars(model)


def test_threads_take_turns(llama):
    """A layer's number is hidden while a step runs it, and the other thread would find it hidden."""
    model, ours, loop = llama
    calls = loop.calls
    expected = model.generate(**prompts(), **greedy())
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(lambda _: ours.generate(**prompts(), **greedy()), range(6)))
    finally:
        sys.setswitchinterval(before)
    assert all(torch.equal(each, expected) for each in found) and loop.calls == calls + 6
    assert [layer.self_attn.layer_idx for layer in ours.model.layers] == [0, 1]
