"""TRL's GRPO, with its defaults: rollouts by recorded steps give the losses of plain ones."""

import pytest
import torch

import tunecompile
from tests.runtime.rollouts.recorder import loop_of
from tests.support.models.pairs import attending
from tests.support.trainers import grpo

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(folder, optimize):
    """Rewards and gradients of two steps, and the loop."""
    torch.manual_seed(0)
    model = attending(vocab_size=320).float()
    loop = loop_of(tunecompile.optimize(model, executor="eager")) if optimize else None

    def reward(completions, **_):
        return [float(len(set(each))) for each in completions]

    trainer = grpo(model, folder, reward, max_steps=2, max_completion_length=12)
    return [(log["reward"], log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log], loop


def test_rewards_and_gradients_are_those_of_plain_rollouts(tmp_path):
    """Completions of the second step are drawn from the weights that the first one left."""
    plain, _ = trained(tmp_path / "plain", optimize=False)
    found, loop = trained(tmp_path / "ours", optimize=True)
    assert loop.calls == 2 and not loop.left and loop.recorder.replays == 20
    assert len(found) == 2 and found[0] != found[1]
    for ours, theirs in zip(found, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
