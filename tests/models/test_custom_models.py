"""Models nobody prepared us for, torch alone: right numbers everywhere, and the report says what was refused."""

import pytest
import torch
from torch import nn

import tunecompile
from tests.support.models.custom import (
    HEADS,
    WIDTH,
    Modern,
    NanoGPT,
    Plain,
    ids,
    trained_beside_eager,
    weighted,
)
from tests.support.notes import has

pytestmark = pytest.mark.filterwarnings("ignore")


def matches(report) -> dict[str, tuple[int, int]]:
    return {m.family: (m.found, m.rewritten) for m in report.matches if m.found}


# -- two transformers, written in different styles -----------------------------------------------------------------------


def test_modern_style():
    report = trained_beside_eager(
        Modern(), ids(), labels=ids(), loss=lambda out: out["loss"] + 0.1 * out["hidden"][0].square().mean()
    )
    assert report.compiles == 1 and report.regions[0].layers == 3
    found = matches(report)
    assert found["rms_norm"] == (2, 2) and found["linear_cross_entropy"] == (1, 1) and found["rope"] == (2, 2), report
    for family, (seen, done) in found.items():  # what is not rewritten is explained
        assert seen == done or next(m for m in report.matches if m.family == family).refused, report


def test_gpt_style():
    report = trained_beside_eager(NanoGPT(), ids(), ids(), loss=lambda out: out[1])
    assert report.compiles == 1 and report.regions[0].layers == 3
    assert has(report, "no-output-embedding")


# -- other shapes of model ----------------------------------------------------------------------------------------------


def test_no_repeated_layers():
    x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    report = trained_beside_eager(
        Plain(), x, scale=2.0, loss=lambda out: weighted(out["out"]) + out["aux"][0] + out["aux"][2][0].mean()
    )
    assert report.compiles == 1 and has(report, "no-layers-found")
    assert matches(report)["rms_norm"] == (1, 1)


class Beside(nn.Module):
    """A small tower of layers beside a large part that has none."""

    def __init__(self, width: int):
        super().__init__()
        self.tower = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.embed, self.parts = nn.Embedding(1000, 8), nn.ModuleList([nn.Sequential(nn.Linear(8, width)), Wide(width)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for part in (*self.tower, *self.parts):
            x = part(x)
        return x


class Wide(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.out = nn.Linear(width, 8)

    def forward(self, x):
        return self.out(x)


@pytest.mark.parametrize("width, said", [(64, True), (2, False)])
def test_most_weights_in_no_layer_are_told(width, said):
    report = trained_beside_eager(Beside(width), ids())
    assert [r.layers for r in report.regions] == [2], report
    assert said == has(report, "weights-outside-layers", subject="tower"), report


def test_no_parameters_and_no_layers():
    x = torch.randn(2, 3, requires_grad=True)
    model = tunecompile.optimize(nn.Identity().train(), executor="eager")
    model(x).sum().backward()
    assert x.grad.eq(1).all() and str(tunecompile.report(model))


class Sequence(nn.Module):
    """Layers in an nn.Sequential, and an encoder beside a decoder."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(2))
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, HEADS, WIDTH, 0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, source, target):
        memory = self.encoder(source)
        for layer in self.decoder:
            target = layer(target, memory)
        return target


def test_encoder_and_decoder():
    report = trained_beside_eager(Sequence(), torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH))
    assert len(report.regions) == 2 and all(r.compiles >= 1 and r.layers == 2 for r in report.regions), report
