"""Bytes of log-probabilities of tokens: no tensor of all logits, and kernels that read the memory they are given."""

import copy
import ctypes
import importlib

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_same_run
from tests.support.losses import SPELLINGS, each_of
from tests.support.models.pairs import of_plain_layers, pair, small

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
op = importlib.import_module("tunecompile.ops.linear_cross_entropy")  # the package shows the op of that name


class Sizes(TorchDispatchMode):
    """The most elements of what any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max(
            [
                self.numel,
                *(
                    t.numel()
                    for t in tree_leaves(result)
                    if isinstance(t, Tensor) and t.device.type != "meta" and type(t) is Tensor
                ),
            ]
        )
        return result


def test_nothing_of_rows_times_vocabulary_is_made_or_saved(monkeypatch):
    monkeypatch.setattr(op, "chunk_rows", lambda vocabulary: 8)
    build = lambda: small(vocab_size=4096)  # noqa: E731
    model = tunecompile.optimize(zoo.adapt(build(), target_modules=["q_proj", "v_proj"]), executor="eager").train()
    inputs, saved, size = zoo.batch(rows=4, length=40), [], 4 * 39 * 4096
    for spelling in each_of(SPELLINGS, model):
        logits = model(inputs["input_ids"]).logits
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t),
            Sizes() as sizes,
        ):
            loss = spelling(logits[:, :-1], inputs["labels"][:, 1:].clamp(min=0)).sum()
        assert max(saved) <= 4096 * 64 < size and sizes.numel < size
        with Sizes() as sizes:
            loss.backward()
        assert 0 < sizes.numel < size


class OfMemory(torch.autograd.Function):
    """As kernels see tensors: an address and strides (TRL's for log-probabilities, since 1.15)."""

    @staticmethod
    def forward(ctx, logits):
        strides, size = logits.stride(), logits.shape
        reach = 1 + sum(stride * (length - 1) for stride, length in zip(strides, size))
        memory = torch.frombuffer((ctypes.c_float * reach).from_address(logits.data_ptr()), dtype=torch.float32)
        ctx.save_for_backward(logits)
        return memory.as_strided(size, strides).logsumexp(-1)

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0].softmax(-1) * grad[..., None]


CUTS = {
    "every other": lambda logits: logits[:, ::2] / 0.7,
    "as they are": lambda logits: logits,
    "casts": lambda logits: logits.float()[..., 3:],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_kernels_take_address_and_strides(cut):
    assert_same_run(
        *pair(of_plain_layers), lambda model: OfMemory.apply(cut(model(zoo.batch()["input_ids"]).logits)).sum()
    )


def test_a_mean_over_no_label_trains_nothing():
    """torch's is no number, with gradients that are zero: an optimizer's step leaves the weights as they are."""
    torch.manual_seed(0)
    reference = zoo.adapt(zoo.make("llama", num_hidden_layers=2), r=8).train()
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    tokens = torch.randint(0, 64, (2, 8))
    labels = torch.full_like(tokens, -100)
    losses = []
    for each in (reference, model):
        losses.append(each(tokens, labels=labels).loss)
        losses[-1].backward()
    assert losses[0].isnan()
    torch.testing.assert_close(losses[1], losses[0], equal_nan=True)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
        if theirs.grad is not None:
            assert not theirs.grad.any()
            torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda said: f"{name}: {said}", atol=1e-6, rtol=1e-4)
