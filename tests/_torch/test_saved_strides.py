"""Backwards that were compiled for other strides than hooks of the caller give back."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import tunecompile
from tunecompile._torch import saved_strides
from tunecompile._torch.fake_tensors import FakeTensorMode
from tunecompile._torch.saved_strides import notice_hooks, with_strides


@pytest.fixture(autouse=True)
def unseen(monkeypatch):
    monkeypatch.setattr(saved_strides._Seen, "hooks", False)


def fake(*values):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return [mode.from_tensor(value, static_shapes=False) for value in values]


def given_back(tensor):
    return torch.from_numpy(tensor.numpy().copy(order="C"))


def packed(run):
    def pack(tensor):
        return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().numpy().copy(order="C")

    with saved_tensors_hooks(pack, lambda value: value if isinstance(value, torch.Tensor) else torch.from_numpy(value)):
        return run()


def test_strides_are_those_that_code_was_made_for():
    made_for = [torch.randn(5, 8).t(), torch.randn(3, 5, 8)[:, :, :4], torch.randn(5), torch.randn(1, 5)]
    run = with_strides(lambda inputs: [each.stride() for each in inputs], [*fake(*made_for), torch.randn(2)])
    for width in (5, 9):  # sizes are symbols
        inputs = [
            torch.randn(width, 8).t(),
            torch.randn(3, width, 8)[:, :, :4],
            torch.randn(width),
            torch.randn(1, width),
        ]
        plain = [given_back(each) for each in inputs]
        wanted = [each.stride() for each in inputs]
        saved_strides._Seen.hooks = False
        assert run([*plain, torch.randn(2)])[:4] == [each.stride() for each in plain]
        saved_strides._Seen.hooks = True
        held = [*plain, torch.randn(2)]
        assert run(held)[:3] == wanted[:3] and held[2] is plain[2] and held[3] is plain[3]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(held, inputs))


def test_hooks_are_noticed_and_checkpoints_are_none():
    torch.utils.checkpoint.checkpoint(lambda x: notice_hooks() or x, torch.ones(2), use_reentrant=False)
    assert not saved_strides._Seen.hooks
    packed(notice_hooks)
    assert saved_strides._Seen.hooks


class Layer(nn.Module):
    """Saves halves of one product."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x):
        gate, up = self.linear(x).chunk(2, -1)
        return x + nn.functional.silu(gate) * up


class Heads(nn.Module):
    """Saves heads that stand before tokens; its backward views them with tokens first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        heads = self.linear(x).unflatten(-1, (4, 4)).transpose(1, 2).relu()
        return x + heads.transpose(1, 2).flatten(2)


class Stack(nn.Module):
    def __init__(self, kind=Layer):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    "firsts, lengths",
    [([packed], (6,)), ([packed, lambda run: run()], (6, 9, 6))],
    ids=["generated", "symbols and caches"],
)
def test_saved_tensors_that_were_copied(firsts, lengths, tmp_path, monkeypatch):
    """Generated code, for constant sizes and for symbols; the second time from caches, without hooks in the first batch."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    reference = Stack().train()
    for first in firsts:
        torch._dynamo.reset()
        monkeypatch.setattr(saved_strides._Seen, "hooks", False)
        assert_same(tunecompile.optimize(copy.deepcopy(reference)), reference, first, lengths)


@pytest.mark.parametrize("kind", [Layer, Heads])
def test_op_by_op(kind):
    reference = Stack(kind).train()
    assert_same(tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference, packed, (6, 9))


def assert_same(model, reference, first, lengths):
    for number, length in enumerate(lengths):
        run, grads = first if number == 0 else packed, []
        for m in (model, reference):
            m.zero_grad()
            x = torch.randn(2, length, 16, generator=torch.Generator().manual_seed(length))
            run(lambda m=m, x=x: m(x)).square().mean().backward()
            grads.append([p.grad for p in m.parameters()])
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
