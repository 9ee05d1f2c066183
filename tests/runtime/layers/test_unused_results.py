"""Results of layers that nobody uses: what only they depend on has no gradient, as in eager."""

import copy

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo

WIDTH = 8


class TwoStreams(nn.Module):
    """Both are mixed, and then each has an MLP, as in blocks of diffusion transformers."""

    def __init__(self):
        super().__init__()
        self.mix, self.image, self.text = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, image, text):
        both = self.norm(image + self.mix(text.mean(1, keepdim=True)))
        return image + self.image(both).sin(), text + self.text(self.norm(text)).sin()


class Model(nn.Module):
    def __init__(self, uses_text):
        super().__init__()
        self.layers, self.uses_text = nn.ModuleList(TwoStreams() for _ in range(3)), uses_text

    def forward(self, image, text):
        for layer in self.layers:
            image, text = layer(image, text)
        return image.square().mean() + (text.square().mean() if self.uses_text else 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("uses_text", [False, True])
def test_gradients_are_eagers(uses_text):
    torch.manual_seed(0)
    reference = Model(uses_text).double().train()
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    for seed, (rows, length) in enumerate(((2, 5), (3, 7), (3, 6))):
        found = []
        for each in (model, reference):
            each.zero_grad()
            torch.manual_seed(seed)
            each(*(torch.randn(rows, n, WIDTH, dtype=torch.float64).requires_grad_() for n in (length, 4))).backward()
            found.append({name: p.grad for name, p in each.named_parameters() if p.grad is not None})
        ours, theirs = found
        assert ours.keys() == theirs.keys()
        assert max(zoo.errors(ours, theirs).values()) < 1e-9
    assert ("layers.2.text.weight" in ours) == uses_text and "layers.1.text.weight" in ours
