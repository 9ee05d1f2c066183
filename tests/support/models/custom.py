"""Transformers in styles of their own, torch alone, and a comparison of their training with eager's."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tunecompile

VOCABULARY, WIDTH, HEADS = 61, 32, 4


def weighted(out: Tensor) -> Tensor:
    """A loss in which every element has its own weight. (The mean square of a norm's output is a constant: its gradient is rounding.)"""
    return (out * torch.cos(torch.arange(out.numel())).reshape(out.shape)).mean()


def trained_beside_eager(model: nn.Module, *args, loss=None, steps: int = 2, **kwargs) -> tunecompile.report:
    """A few optimizer steps beside the same model as it was; returns the report."""
    reference = copy.deepcopy(model).train()
    model = tunecompile.optimize(model.train(), executor="eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, reference)]
    for _ in range(steps):
        losses = []
        for m, optimizer in zip((model, reference), optimizers):
            torch.manual_seed(3)
            optimizer.zero_grad()
            out = m(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            value = loss(out) if loss else weighted(out)
            value.backward()
            losses.append(value.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None:
                assert (ours.grad - theirs.grad).norm() <= 1e-4 * theirs.grad.norm().clamp_min(1e-4), name
        for optimizer in optimizers:
            optimizer.step()
    return tunecompile.report(model)


def ids(rows: int = 2, length: int = 11) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on neighbouring channels, as in the papers and in Meta's own code."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), self.scale, 1e-5)


class ModernBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH, eps=1e-6), Norm()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x, tables):
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(rotate_pairs(q, *tables), rotate_pairs(k, *tables), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Modern(nn.Module):
    def __init__(self, layers: int = 3):
        super().__init__()
        self.embed, self.norm, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.RMSNorm(WIDTH),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
        )
        self.blocks = nn.ModuleList(ModernBlock() for _ in range(layers))

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens, labels):
        x, half = self.embed(tokens), WIDTH // HEADS // 2
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] / 100 ** (
            torch.arange(half, device=x.device) / half
        )
        for block in self.blocks:
            x = block(x, (angles.cos(), angles.sin()))
        return {"loss": F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten()), "hidden": (x,)}


class OldBlock(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(WIDTH, dim=2)
        q, k, v = (part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in (q, k, v))
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = F.softmax(weights.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf")), dim=-1)
        x = x + self.c_proj((self.dropout(weights) @ v).transpose(1, 2).contiguous().view(b, t, c))
        return x + self.dropout(self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)))))


class NanoGPT(nn.Module):
    """The layers are in a ModuleDict, whose forward nobody calls."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(VOCABULARY, WIDTH),
                wpe=nn.Embedding(64, WIDTH),
                h=nn.ModuleList(OldBlock(dropout) for _ in range(3)),
                ln_f=nn.LayerNorm(WIDTH),
            )
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Plain(nn.Module):
    """No repeated layers: one region."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x, scale: float = 1.0):
        gate, up = self.first(x).chunk(2, -1)
        return {"out": self.norm(self.second(F.silu(gate) * up)) * scale, "aux": (gate.mean(), None, [up])}
