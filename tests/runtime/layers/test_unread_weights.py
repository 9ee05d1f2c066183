"""Attention weights that blocks return, and that their caller did not request: never made, unless somebody reads them."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tunecompile
from tests.support.notes import find, has
from tunecompile.runtime.layers.unread_weights import unread

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, HEADS = 16, 2


class Block(nn.Module):
    """As BLOOM's and GPT-J's: it returns its weights whether they are requested or not."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, output_attentions=False):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        weights = F.softmax(q @ k.transpose(-1, -2) * 0.3, dim=-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2)), weights


class Model(nn.Module):
    def __init__(self, reads=None):
        super().__init__()
        self.blocks, self.reads = nn.ModuleList(Block() for _ in range(2)), reads

    def forward(self, x, asks=False):
        penalty = 0.0
        for block in self.blocks:
            x, weights = block(x, output_attentions=asks)
            penalty = penalty + (self.reads(weights) if self.reads is not None else 0.0)
        return x, penalty


def steps(reads=None, asks=False, count=2):
    torch.manual_seed(0)
    theirs = Model(reads).train()
    ours = tunecompile.optimize(copy.deepcopy(theirs), executor="eager")
    for seed in range(count):
        for model in (theirs, ours):
            model.zero_grad()
            x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed))
            made, penalty = model(x, asks)
            (made.square().mean() + penalty).backward()
        for mine, other in zip(ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)  # keys have no gradient: rounding
    (found,) = [m for m in tunecompile.report(ours).matches if m.family == "attention"]
    return ours, found


def test_weights_that_nobody_reads_are_not_made():
    model, found = steps()
    assert (found.found, found.rewritten) == (1, 1)
    made = model.blocks[0](torch.randn(2, 5, WIDTH), output_attentions=False)[1]
    assert made.shape == (2, HEADS, 5, 5) and not has(model, "weights-read")


def test_weights_that_are_read_are_right_and_are_returned_from_then_on():
    model, found = steps(reads=lambda weights: weights.square().sum())
    assert found.rewritten == 0 and "returns its weights" in found.refused[0]
    assert len(find(model, "weights-read")) == 1


@pytest.mark.parametrize(
    "copied", [lambda x: pickle.loads(pickle.dumps(x)), lambda x: x + 0, torch.clone, copy.deepcopy]
)
def test_ways_to_read(copied):
    """They are made once, by the layer's own code."""
    made = []
    weights = unread(
        (torch.ones(2, 3), torch.empty(0, 2, 5, 5)), lambda: made.append(0) or (None, torch.ones(2, 2, 5, 5))
    )
    assert weights[1].shape == (2, 2, 5, 5) and weights[1].dtype == torch.float32 and not made
    assert torch.equal(torch.as_tensor(copied(weights[1])).sum(), torch.tensor(100.0))
    assert weights[1].sum() == 100 and made == [0]


class Quiet(Block):
    """As Bamba's: its caller cannot request weights."""

    def __init__(self):
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        weights = self.softmax(q @ k.transpose(-1, -2) * 0.3)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2)), weights


class Collecting(nn.Module):
    """What transformers' models say that collect weights by hooks."""

    _can_record_outputs = {"attentions": nn.Softmax}

    def __init__(self, reads=None):
        super().__init__()
        self.blocks, self.reads = nn.ModuleList(Quiet() for _ in range(2)), reads

    def forward(self, x):
        penalty = 0.0
        for block in self.blocks:
            x, weights = block(x)
            penalty = penalty + (self.reads(weights) if self.reads is not None else 0.0)
        return x.square().mean() + penalty


def collected(reads=None, before=lambda model: None, kind=Collecting):
    torch.manual_seed(0)
    theirs = kind(reads).train()
    ours = tunecompile.optimize(copy.deepcopy(theirs), executor="eager")
    for model in (theirs, ours):
        before(model)
        model(torch.ones(2, 5, WIDTH).cumsum(1) * 0.1).backward()
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)  # keys have no gradient: rounding
    return [m.rewritten for m in tunecompile.report(ours).matches if m.family == "attention"], ours


def test_weights_of_a_model_that_collects_them_by_hooks():
    rewritten, model = collected()
    assert rewritten == [1] and not has(model, "weights-read")


def test_weights_that_such_a_model_reads_all_the_same():
    _, model = collected(reads=lambda weights: weights.square().sum())
    assert has(model, "weights-read")


def test_weights_of_a_model_that_says_nothing_are_made():
    assert collected(kind=type("Silent", (Collecting,), {"_can_record_outputs": None}))[0] == [0]


def test_a_hook_inside_gets_weights():
    """None of no row."""
    seen = []

    def before(model):
        for block in model.blocks:
            block.softmax.register_forward_hook(lambda module, args, output: seen.append(output.sum()))

    assert collected(before=before)[0] == [0]
    torch.testing.assert_close(torch.stack(seen[:2]), torch.stack(seen[2:]))


def test_weights_that_a_piece_hands_to_the_next():
    """Where the layer breaks behind attention, its own code reads them. (They were of no row: a sum of 0.)"""

    class Broken(Quiet):
        def forward(self, x):
            q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            weights = self.softmax(q @ k.transpose(-1, -2) * 0.3)
            x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
            torch._dynamo.graph_break()
            return x * weights.square().sum(), weights

    def before(model):
        for block in model.blocks:
            block.__class__ = Broken

    collected(before=before)
