"""The loop of the docs with a model of torchtitan's: the losses of training without us, and what was rewritten.
`make test-hosts HOST=torchtitan` runs this in its own environment.
"""

import re
from pathlib import Path

import pytest
import torch

import tunecompile

pytest.importorskip("torchtitan")
from torchtitan.models.common.attention import ScaledDotProductAttention

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = Path(__file__).parents[2] / "docs" / "pages" / "guides" / "loops.md"


def on_a_cpu(model: torch.nn.Module) -> torch.nn.Module:
    """With torchtitan's SDPA: its attention for language models needs a GPU. And the same weights each time."""
    generator = torch.Generator().manual_seed(0)
    for layer in model.layers.values():
        layer.attention.inner_attention = ScaledDotProductAttention(ScaledDotProductAttention.Config())
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return model


def batches() -> list[dict]:
    made = [torch.randint(0, 2048, (2, 33), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    positions = torch.arange(32).expand(2, -1)
    return [{"tokens": ids[:, :-1], "labels": ids[:, 1:], "positions": positions} for ids in made]


def losses(code: str) -> tuple[list[float], torch.nn.Module]:
    space = {"prepare": on_a_cpu, "batches": batches(), "losses": []}
    exec(code.replace("    loss.backward()", "    losses.append(loss.item())\n    loss.backward()"), space)
    return space["losses"], space["model"]


def test_the_loop_of_the_page(monkeypatch):
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "torchtitan" in code]
    optimize = tunecompile.optimize
    monkeypatch.setattr(tunecompile, "optimize", lambda model: model)
    plain, _ = losses(code.replace("print(tunecompile.report(model))", ""))
    monkeypatch.setattr(tunecompile, "optimize", lambda model: optimize(model, executor="eager"))
    ours, model = losses(code)
    assert ours == pytest.approx(plain, rel=1e-4) and len(plain) == 3
    report = tunecompile.report(model)
    found = {match.family: match.rewritten for match in report.matches}
    assert found["swiglu"] == 1 and found["linear_cross_entropy"] == 1 and report.regions[0].layers == 6, report
