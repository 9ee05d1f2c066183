"""Mixtures whose experts are MLPs of their own in a list, in loops as transformers 4 and remote code write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import zoo


class Expert(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Loop(nn.Module):
    """Over all experts."""

    def __init__(self, width: int, experts: int = 4, choices: int = 2):
        super().__init__()
        self.gate, self.choices = nn.Linear(width, experts, bias=False), choices
        self.experts = nn.ModuleList(Expert(width, 48) for _ in range(experts))

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = torch.topk(F.softmax(self.gate(tokens), dim=1, dtype=torch.float), self.choices, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True)).to(tokens.dtype), chosen

    def those(self, mask: Tensor):
        return range(len(self.experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        total = torch.zeros_like(tokens)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for number in self.those(mask):
            place, token = torch.where(mask[number].squeeze(0))
            made = self.experts[number](tokens[None, token].reshape(-1, x.shape[-1])) * weights[token, place, None]
            total.index_add_(0, token, made.to(x.dtype))
        return total.reshape(x.shape)


class LoopOverHit(Loop):
    """Over experts that have tokens: another number in every step."""

    def those(self, mask: Tensor):
        return torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()


class Masks(Loop):
    """Rows by a mask for each expert, as remote code of DeepSeek's writes it."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        rows = tokens.repeat_interleave(self.choices, dim=0)
        made = torch.empty_like(rows)
        for number, expert in enumerate(self.experts):
            mine = chosen.view(-1) == number
            made[mine] = expert(rows[mine])
        return (made.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype).view(x.shape)


def make(kind: type[Loop]) -> nn.Module:
    """A Llama whose MLPs are such mixtures, under adapters over their linears, and over one of attention's."""
    model = zoo.make("llama", num_hidden_layers=2)
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.mlp = kind(model.config.hidden_size)
    return zoo.adapt(model, target_modules=["q_proj", "w1", "w2", "w3"])
