"""GRPO's batches without a gradient: no backward pass, and the same training."""

import pytest
import torch

import tunecompile
from tests.support.models.pairs import attending
from tests.support.tokenizers import byte_level

trl, datasets = (pytest.importorskip(name) for name in ("trl", "datasets"))
pytestmark = pytest.mark.filterwarnings("ignore")


def trained(folder, monkeypatch, left_out=True, memory=None, dropout=0.0, **config):
    """The logs, the model's trained weights and the callback of four steps; rewards are equal in the second and third."""
    from peft import LoraConfig

    if not left_out:
        monkeypatch.setattr("tunecompile.trainers.huggingface.calling_trainer", lambda: None)
    torch.manual_seed(0)
    tokenizer, steps = byte_level(), iter(range(100))
    tokenizer.pad_token = tokenizer.eos_token = "</s>"
    callback = tunecompile.Callback(executor="eager", memory=memory)

    def reward(completions, **_):
        equal = next(steps) in (1, 2)
        return [1.0 if equal else float(len(set(each))) for each in completions]

    arguments = trl.GRPOConfig(
        output_dir=str(folder),
        max_steps=4,
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=6,
        learning_rate=1e-2,
        weight_decay=0.1,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **config,
    )
    trainer = trl.GRPOTrainer(
        attending(vocab_size=320).float(),
        reward_funcs=reward,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["hello abc", "say one two"] * 4}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=dropout),
        callbacks=[callback],
    )
    trainer.train()
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


def test_a_distance_to_the_reference_is_a_gradient(tmp_path, monkeypatch):
    logs, _, callback = trained(tmp_path, monkeypatch, beta=0.5)
    assert min(norm for *_, norm in logs) > 0
    assert not callback.unneeded.batches
