"""Problems for the fused head and loss, and the largest tensor that a computation makes."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T, H, V = 13, 6, 9


def problem(dtype=torch.float64, bias=True, masked="some", ignore=-100, rows=T):
    hidden, weight = torch.randn(rows, H).to(dtype), torch.randn(V, H).to(dtype)
    labels = torch.randint(0, V, (rows,))
    if masked == "some":
        labels[::3] = ignore
    elif masked == "all":
        labels[:] = ignore
    return hidden, weight, torch.randn(V).to(dtype) if bias else None, labels


OPTIONS = [
    dict(),
    dict(scale=0.5),
    dict(scale=-1.5),
    dict(softcap=2.0),
    dict(scale=3.0, softcap=1.5, smoothing=0.1),
    dict(smoothing=0.2),
    dict(smoothing=1.0),
]


class Largest(TorchDispatchMode):
    """The size of the largest tensor any operation gives."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))])
        return result


def sure(dtype, tokens=6, words=64, width=32):
    """Hidden states, weight and labels of tokens whose probability is 1 - 6e-7 or more."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(words, width, generator=generator, dtype=torch.float64) / width**0.5
    labels = torch.randint(0, words, (tokens,), generator=generator)
    hidden = weight[labels] / weight[labels].square().sum(-1, keepdim=True) * 40
    return hidden.to(dtype), weight.to(dtype), labels
