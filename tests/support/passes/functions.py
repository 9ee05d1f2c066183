"""Functions and modules as users write them, for the recognise passes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.passes.run import random


def operands(n=6, k=8, r=2, dtype=torch.float32, adapters=None, bias=False):
    made = [
        random(n, k, dtype=dtype, grad=False),
        random(r, k, dtype=adapters or dtype),
        random(n, r, dtype=adapters or dtype),
    ]
    return made + ([random(n, dtype=dtype)] if bias else [])


def lora(x, w, a, b, bias=None, scale=0.5):
    return F.linear(x, w, bias) + F.linear(F.linear(x, a), b) * scale


def rows_of(x, w, bias):
    """GPT-2's linears: the weight is [in, out]."""
    return torch.addmm(bias, x.view(-1, x.size(-1)), w).view(x.size()[:-1] + (w.shape[1],))


class PeftBlock(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.q, self.k, self.o = nn.Linear(8, 8, bias=bias), nn.Linear(8, 4, bias=bias), nn.Linear(8, 6, bias=bias)

    def forward(self, x):
        return self.o(torch.tanh(self.q(x)) * self.k(x).repeat(1, 1, 2))


def peft_block(biased=False, dtype=torch.float32, **options):
    peft = pytest.importorskip("peft")
    block = PeftBlock(biased).to(dtype)
    block.requires_grad_(False)
    settings = dict(r=2, lora_alpha=8, lora_dropout=0.0, target_modules=["q", "k", "o"])
    model = peft.inject_adapter_in_model(peft.LoraConfig(**{**settings, **options}), block)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3)
        if "bias" in options and name.endswith("bias"):
            p.requires_grad_()
    return model.train()


def trained_block(model):
    return [p for p in model.parameters() if p.requires_grad]


class Siblings(nn.Module):
    """Adapted linears of one input, PEFT's spelling."""

    def __init__(
        self, number, dropout=0.0, bias=False, ranks=(2, 3, 1), sizes=(6, 4, 5), same=False, dtype=torch.float32
    ):
        super().__init__()
        sizes, ranks = (sizes[:1] * 3, ranks[:1] * 3) if same else (sizes, ranks)

        def each(make):
            made = [make(i) for i in range(number)]
            return nn.ParameterList(made[:1] * number if same else made)

        self.w = each(lambda i: nn.Parameter(torch.randn(sizes[i], 8, dtype=dtype), requires_grad=False))
        self.a = each(lambda i: nn.Parameter(torch.randn(ranks[i], 8)))
        self.b = each(lambda i: nn.Parameter(torch.randn(sizes[i], ranks[i])))
        self.bias = each(lambda i: nn.Parameter(torch.randn(sizes[i], dtype=dtype))) if bias else [None] * number
        self.dropout, self.scales = dropout, [0.5, 2.0, 1.0] if not same else [0.5] * 3

    def trained(self):
        return [p for p in self.parameters() if p.requires_grad]

    def one(self, i, x):
        result = F.linear(x, self.w[i], self.bias[i])
        dtype = result.dtype
        own = F.dropout(x.to(self.a[i].dtype), self.dropout, self.training) if self.dropout else x.to(self.a[i].dtype)
        return (result + F.linear(F.linear(own, self.a[i]), self.b[i]) * self.scales[i]).to(dtype)

    def forward(self, x):
        return tuple(self.one(i, x) for i in range(len(self.w)))


def mlp_weights(**options):
    return [*operands(12, 8, **options), *operands(12, 8, **options), *operands(8, 12, **options)]


def mlp(x, *o, act=F.silu):
    return lora(act(lora(x, *o[:3])) * lora(x, *o[3:6]), *o[6:])


def linear_4bit(
    n=6, k=64, bias=False, dtype=torch.float32, double=True, quant_type="nf4", blocksize=None, storage=torch.uint8
):
    bnb = pytest.importorskip("bitsandbytes")
    made = bnb.nn.Linear4bit(
        k, n, bias=bias, compute_dtype=dtype, quant_type=quant_type, compress_statistics=double, quant_storage=storage
    )
    options = {"quant_storage": storage} if blocksize is None else {"blocksize": blocksize, "quant_storage": storage}
    made.weight = bnb.nn.Params4bit(
        torch.randn(n, k, dtype=dtype),
        requires_grad=False,
        quant_type=quant_type,
        compress_statistics=double,
        **options,
    )
    if bias:
        made.bias = nn.Parameter(torch.randn(n, dtype=dtype))
    return made.to("cpu").train()


def repeated(x, groups):
    """Keys or values for each head of queries, as transformers writes it."""
    batch, shared, tokens, width = x.shape
    wide = x[:, :, None, :, :].expand(batch, shared, groups, tokens, width)
    return wide.reshape(batch, shared * groups, tokens, width)
