"""GRPO's batches without a gradient: no backward pass, and the same training."""

import pytest
import torch
from torch import nn

import tunecompile
from tests.support.models.pairs import attending
from tests.support.trainers import grpo
from tunecompile.runtime.loss_head.token_scores import token_scores
from tunecompile.trainers.unneeded_backward import _without_gradient

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(folder, monkeypatch, left_out=True, memory=None, **options):
    """The logs, the model's trained weights and the callback of four steps; rewards are equal in the second and third."""
    if not left_out:
        monkeypatch.setattr("tunecompile.trainers.huggingface.calling_trainer", lambda: None)
    torch.manual_seed(0)
    steps, callback = iter(range(100)), tunecompile.Callback(executor="eager", memory=memory)

    def reward(completions, **_):
        equal = next(steps) in (1, 2)
        return [1.0 if equal else float(len(set(each))) for each in completions]

    settings = dict(max_completion_length=6, weight_decay=0.1)
    trainer = grpo(attending(vocab_size=320).float(), folder, reward, [callback], **settings, **options)
    logs = [(log["reward"], log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log]
    return logs, [weight for weight in trainer.model.parameters() if weight.requires_grad], callback


def test_equal_rewards_get_none(tmp_path, monkeypatch):
    """Under a budget, whose layers wait for a backward pass, and with dropout, which draws."""
    options = {"memory": 1 << 30, "dropout": 0.1}
    logs, weights, callback = trained(tmp_path / "left", monkeypatch, **options)
    whole, expected, _ = trained(tmp_path / "whole", monkeypatch, left_out=False, **options)
    assert (callback.unneeded.batches, callback.unneeded.rows) == (2, 8)
    assert "the losses of 2 batches, 8 completions" in str(callback.report())
    assert [norm for *_, norm in logs][1:3] == [0, 0] and logs == whole and min(logs[0][2], logs[3][2]) > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, expected, strict=True))


@pytest.mark.parametrize("advantage, beside", [(0.0, None), (0.0, "weight"), (0.0, "hidden"), (1.0, None)])
def test_losses_of_which_scores_are_all(advantage, beside):
    """A router's loss beside them has a gradient where theirs is zero."""
    hidden, weight, other = (nn.Parameter(torch.randn(rows, 4)) for rows in (3, 7, 2))
    scores, _ = token_scores(hidden, weight, None, torch.tensor([1, 0, 5]), 1.0, 0.0, ())
    loss = (advantage * scores).sum()
    found = _without_gradient(loss + {"weight": other, "hidden": hidden}[beside].square().sum() if beside else loss)
    assert found is None if beside or advantage else {*map(id, found)} == {id(hidden), id(weight)}
    assert _without_gradient(other.sum() * 0) is None and _without_gradient(loss.detach()) is None
