"""TRL's GRPO, with its defaults: rollouts by recorded steps give the losses of plain ones."""

import pytest
import torch

import tunecompile
from tests.runtime.rollouts.recorder import loop_of
from tests.support.models.pairs import attending
from tests.support.tokenizers import byte_level

trl, datasets = (pytest.importorskip(name) for name in ("trl", "datasets"))
pytestmark = pytest.mark.filterwarnings("ignore")


def trained(folder, optimize):
    """Rewards and gradients of two steps, and the loop."""
    from peft import LoraConfig

    torch.manual_seed(0)
    model, tokenizer = attending(vocab_size=320).float(), byte_level()
    tokenizer.pad_token = tokenizer.eos_token = "</s>"
    loop = loop_of(tunecompile.optimize(model, executor="eager")) if optimize else None
    arguments = trl.GRPOConfig(
        output_dir=str(folder),
        max_steps=2,
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=12,
        learning_rate=1e-2,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(set(each))) for each in completions],
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["hello abc", "say one two"] * 4}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    return [(log["reward"], log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log], loop


def test_rewards_and_gradients_are_those_of_plain_rollouts(tmp_path):
    """Completions of the second step are drawn from the weights that the first one left."""
    plain, _ = trained(tmp_path / "plain", optimize=False)
    found, loop = trained(tmp_path / "ours", optimize=True)
    assert loop.calls == 2 and not loop.left and loop.recorder.replays == 20
    assert len(found) == 2 and found[0] != found[1]
    for ours, theirs in zip(found, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
