"""Losses of preferences and rewards by TRL's own functions and trainers: the same curves as without `optimize`, and no logits but for metrics."""

import importlib

import pytest
import torch
import torch.nn.functional as F

import tunecompile
from tests.models import zoo
from tests.models.test_loops import equal, fell_back, pair, small
from tests.models.test_row_losses import made, tally  # noqa: F401: a fixture
from tests.models.test_trainers import Rows, arguments, curve, tokenizer

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")


def adapted():
    return zoo.adapt(small(), target_modules=["q_proj", "down_proj"])


def answers(model, inputs):
    """The log-probability of each row's labelled tokens, as TRL's DPOTrainer computes it outside its fused head."""
    from trl.trainer.utils import selective_log_softmax

    logits, labels = model(inputs["input_ids"]).logits[..., :-1, :].contiguous(), inputs["labels"][..., 1:].contiguous()
    each = selective_log_softmax(logits, labels.clamp(min=0))
    return torch.where(labels == -100, 0.0, each).sum(1)


def dpo(model):
    inputs = zoo.batch(rows=4)
    ours = answers(model, inputs)
    with torch.no_grad(), model.disable_adapter():
        reference = answers(model, inputs)
    chosen, rejected = (ours - reference).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def grpo(model, entropy: bool = True):
    """As of TRL 1.0: a temperature in place, the ratio to what the policy was, clipped, and the entropy as a metric."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    inputs = zoo.batch(rows=4)
    logits = model(inputs["input_ids"]).logits[:, :-1, :][:, -8:, :]
    logits.div_(0.9)
    each = selective_log_softmax(logits, inputs["input_ids"][:, -8:])
    weight = 1.0
    if entropy:
        with torch.no_grad():
            weight = 0.5 + entropy_from_logits(logits)
    ratio, advantages = torch.exp(each - each.detach() * 1.01), torch.tensor([1.0, -1.0, 0.5, -0.2]).unsqueeze(1)
    return -(torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * weight).mean()


@pytest.mark.parametrize("loss", [dpo, grpo, lambda model: grpo(model, False)], ids=["dpo", "grpo", "grpo without entropy"])
def test_by_trls_functions(loss, made):  # noqa: F811
    model, reference = pair(adapted)
    equal(model, reference, loss)
    assert tally(model).rewritten == 1 and len(made) == (loss is grpo)


def pairs():
    import datasets

    rows = [[f"w{i}" for i in row["input_ids"].clamp(max=254).tolist()] for row in Rows(12)]
    return datasets.Dataset.from_list([{"prompt": " ".join(row[:3]), "chosen": " " + " ".join(row[3:]), "rejected": " " + " ".join(row[:2:-1])} for row in rows])


def words():
    from tokenizers.pre_tokenizers import Whitespace

    made = tokenizer()
    made.backend_tokenizer.pre_tokenizer = Whitespace()
    return made


def train(kind: str, model, folder):
    where = trl if hasattr(trl, f"{kind}Trainer") else importlib.import_module(f"trl.experimental.{kind.lower()}")
    settings = dict(max_length=24, eval_strategy="no", dataloader_num_workers=0, bf16=False, gradient_checkpointing=False)
    args = arguments(getattr(where, f"{kind}Config"), folder, **settings)
    trainer = getattr(where, f"{kind}Trainer")(model, args=args, train_dataset=pairs(), processing_class=words())
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", [pytest.param("DPO", marks=pytest.mark.slow), "ORPO"])
def test_trainers(kind, tmp_path):
    model, reference = pair(adapted)
    curves = [curve(train(kind, m, tmp_path)) for m in (model, reference)]
    assert curves[0] and curves[0] == pytest.approx(curves[1], rel=1e-4)
    fused = kind == "DPO" and hasattr(importlib.import_module("trl.trainer.utils"), "add_fused_lm_head")  # TRL's own
    assert tally(model).rewritten == (0 if fused else 1), tunecompile.report(model)
    assert not fell_back(model)
