"""300 steps on real text with everything a long run meets: dropout, accumulation, adapters switched, a checkpoint loaded."""

import copy
import json
from pathlib import Path

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.notes import EAGER, find

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = Path(__file__).parents[2] / "benchmarks/data/wordnet.jsonl"
STEPS, ROWS, LENGTHS = 300, 4, (32, 48)


def batches(count: int) -> list[dict]:
    """Bytes of the WordNet questions, two lengths in turn."""
    text = "\n".join(
        " ".join(m["content"] for m in json.loads(line)["messages"]) for line in TEXT.read_text().splitlines()[:4000]
    )
    stream = torch.tensor(list(text.encode("ascii", "replace")))
    made, at = [], 0
    for i in range(count):
        length = LENGTHS[i // 7 % 2]
        ids = stream[at : at + ROWS * length].reshape(ROWS, length)
        at += ROWS * length
        made.append({"input_ids": ids, "labels": ids})
    return made


def trained(name: str) -> bool:
    return any(part in name for part in ("embed_tokens", "lm_head", "norm"))


def model() -> torch.nn.Module:
    adapted = zoo.adapt(zoo.make("llama", num_hidden_layers=2), r=8, lora_dropout=0.1)
    adapted.add_adapter("second", copy.deepcopy(adapted.peft_config["default"]))
    for name, parameter in adapted.named_parameters():  # a random base learns nothing by adapters alone
        parameter.requires_grad_(parameter.requires_grad or trained(name))
    return adapted.train()


def train(m: torch.nn.Module, seed: int) -> torch.Tensor:
    """Losses of 300 steps of two batches each."""
    trainable = [p for n, p in m.named_parameters() if "lora_" in n or trained(n)]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3)
    torch.manual_seed(seed)
    losses, checkpoint, data = [], None, iter(batches(2 * STEPS))
    for step in range(STEPS):
        if step in (80, 160):
            m.set_adapter("second" if step == 80 else "default")
            for name, parameter in m.named_parameters():  # PEFT freezes all but the adapter
                parameter.requires_grad_(parameter.requires_grad or trained(name))
        if step == 200:
            checkpoint = copy.deepcopy((m.state_dict(), optimizer.state_dict()))
        if step == 240:
            m.load_state_dict(checkpoint[0])
            optimizer.load_state_dict(checkpoint[1])
        total = 0.0
        for _ in range(2):
            loss = m(**next(data)).loss / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return torch.tensor(losses)


def smooth(losses: torch.Tensor) -> torch.Tensor:
    return losses.unfold(0, 20, 5).mean(-1)


@pytest.mark.slow
def test_three_hundred_steps_follow_eager():
    """Dropout draws other masks under compilation, so eager's distance to itself under another seed is the yardstick."""
    eager, again = smooth(train(model(), 0)), smooth(train(model(), 1))
    optimized = tunecompile.optimize(model(), executor="eager")
    ours = smooth(train(optimized, 0))
    assert eager[-1] < 0.75 * eager[0], "the run does not learn, so it proves nothing"
    distance, yardstick = (ours - eager).abs().mean(), (again - eager).abs().mean()
    assert distance <= 1.5 * yardstick, f"{distance:.4f} against {yardstick:.4f}"
    report = tunecompile.report(optimized)
    assert report.compiles <= 8 and not find(report, *EAGER), report
