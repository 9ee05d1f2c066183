"""Models with a state, or with positions, beside keys and values: their tokens are those of transformers' own loop."""

import copy

import pytest
import torch
import transformers

import tunecompile
from tests.runtime.rollouts.calls import greedy, pair, prompts
from tests.runtime.rollouts.recorder import loop_of

pytestmark = pytest.mark.filterwarnings("ignore")
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 20,
    "rope_theta": 10000.0,
}


def test_positions_that_are_scaled_from_a_length_on():
    """Phi-3 computes all tokens anew when the first one is past its original length."""
    model, ours, loop = pair(
        "phi3", initializer_range=0.2, rope_parameters=LONGROPE, original_max_position_embeddings=20
    )
    for new, calls in ((9, 1), (20, 1)):
        settings = greedy(max_new_tokens=new, eos_token_id=None)
        assert torch.equal(ours.generate(**prompts(), **settings), model.generate(**prompts(), **settings))
        assert loop.calls == calls
    assert {why.code for why in loop.left} == {"generation-own-steps"}


def test_a_cache_of_states_alone():
    """It counts no tokens."""
    config = transformers.Mamba2Config(
        hidden_size=64, num_hidden_layers=2, vocab_size=256, num_heads=8, head_dim=16, state_size=16, n_groups=1
    )
    model = transformers.Mamba2ForCausalLM(config).eval()
    ours = tunecompile.optimize(copy.deepcopy(model), executor="eager")
    loop_of(ours)
    assert torch.equal(ours.generate(**prompts(), **greedy()), model.generate(**prompts(), **greedy()))
