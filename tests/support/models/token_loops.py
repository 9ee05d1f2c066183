"""Mixers with loops of their own over tokens or chunks, as code from a checkpoint (`trust_remote_code`) has them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, HEAD, STATES = 61, 32, 2, 8, 4


class DeltaRule(nn.Module):
    """A gated delta rule, token by token."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, HEADS * HEAD, bias=False) for _ in range(3))
        self.decay, self.rate, self.out = (
            nn.Linear(WIDTH, HEADS),
            nn.Linear(WIDTH, HEADS),
            nn.Linear(HEADS * HEAD, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, HEAD)) for part in (self.query, self.key, self.value))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        decay, rate = -F.softplus(self.decay(x)), self.rate(x).sigmoid()
        return self.out(by_tokens(q, k, v, decay, rate).flatten(2))


def by_tokens(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    batch, length, heads, width = q.shape
    state, out = q.new_zeros(batch, heads, width, v.shape[-1]), torch.zeros_like(v)
    for i in range(length):
        state = state * decay[:, i].exp()[..., None, None]
        memory = (state * k[:, i, :, :, None]).sum(-2)
        change = (v[:, i] - memory) * rate[:, i, :, None]
        state = state + k[:, i, :, :, None] * change[..., None, :]
        out[:, i] = (state * q[:, i, :, :, None]).sum(-2)
    return out


class StateSpace(nn.Module):
    """Mamba-1's scan, token by token, whose results are stacked."""

    def __init__(self):
        super().__init__()
        self.enter, self.out = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.rates, self.step = nn.Linear(WIDTH, 2 * STATES + 2, bias=False), nn.Linear(2, WIDTH)
        self.A_log = nn.Parameter(torch.arange(1.0, STATES + 1).log().repeat(WIDTH, 1))
        self.D = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        u, gate = self.enter(x).chunk(2, dim=-1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :length].transpose(1, 2))
        step, b, c = self.rates(u).split([2, STATES, STATES], dim=-1)
        step = F.softplus(self.step(step))
        return self.out(self.scan(u, step, b, c) * F.silu(gate))

    def scan(self, u: Tensor, step: Tensor, b: Tensor, c: Tensor) -> Tensor:
        decay = torch.exp(step[..., None] * -torch.exp(self.A_log))
        enters = step[..., None] * b[:, :, None] * u[..., None]
        state, made = enters.new_zeros(len(u), WIDTH, STATES), []
        for i in range(u.size(1)):
            state = decay[:, i] * state + enters[:, i]
            made.append((state * c[:, i, None]).sum(-1))
        return torch.stack(made, dim=1) + u * self.D


class Chunks(nn.Module):
    """A decaying linear attention by chunks (SSD), which takes lengths that chunks divide or pads."""

    chunk = 16

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, HEADS * HEAD, bias=False) for _ in range(3))
        self.decay, self.out = nn.Linear(WIDTH, HEADS), nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        length, missing = x.shape[1], -x.shape[1] % self.chunk
        x = F.pad(x, (0, 0, 0, missing))
        q, k, v = (part(x).unflatten(-1, (HEADS, HEAD)) for part in (self.query, self.key, self.value))
        decay = -F.softplus(self.decay(x))
        state, made = x.new_zeros(len(x), HEADS, HEAD, HEAD), []
        for begin in range(0, x.shape[1], self.chunk):
            part = slice(begin, begin + self.chunk)
            sums = decay[:, part].cumsum(1).transpose(1, 2)  # [B, H, C]
            within = (sums[..., :, None] - sums[..., None, :]).tril().exp().tril()
            rows, columns, values = (each[:, part].transpose(1, 2) for each in (q, k, v))
            inside = (rows @ columns.transpose(-1, -2) * within) @ values
            made.append(inside + sums.exp()[..., None] * (rows @ state))
            left = (sums[..., -1:] - sums).exp()[..., None]
            state = state * sums[..., -1].exp()[..., None, None] + (columns * left).transpose(-1, -2) @ values
        return self.out(torch.cat(made, dim=2).transpose(1, 2).flatten(2)[:, :length])


MIXERS = {"delta rule": DeltaRule, "state space": StateSpace, "chunks": Chunks}


class Block(nn.Module):
    def __init__(self, mixer: type[nn.Module]):
        super().__init__()
        self.norm_1, self.norm_2, self.mixer = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5), mixer()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm_1(x))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class OfTokenLoops(nn.Module):
    """Two layers with a mixer of `MIXERS`, an embedding and a head."""

    def __init__(self, mixer: str):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(MIXERS[mixer]) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH, 1e-5), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
