"""Experts by the name `tunecompile`, as transformers' models call them: products grouped by expert.

While Dynamo traces it is transformers' own code for grouped products, which passes recognise with whatever adapters,
packed weights and biases it reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import grouped_mm_experts_forward

from tunecompile.ir.eager_call import by_provider
from tunecompile.ops import collect_rows, grouped_lora_linear, inverse_order, spread_rows


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What the experts make of each token, weighted and summed.

    Args:
        self: the module that has their weights.
        hidden_states: [T, H].
        top_k_index: [T, k], the experts of each token.
        top_k_weights: [T, k].

    Returns:
        [T, H], in the dtype of `hidden_states`.
    """
    gated = getattr(self, "has_gate", True)  # transformers 5.0 has no others
    first, last = "gate_up_proj" if gated else "up_proj", "down_proj"
    stacks = {} if torch.compiler.is_compiling() else {name: getattr(self, name) for name in (first, last)}
    if not stacks or not _is_plain(self, stacks, hidden_states):
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    choices = top_k_index.shape[-1]
    expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
    places = inverse_order(order)
    ends = torch.searchsorted(expert, torch.arange(self.num_experts, device=expert.device), right=True).int()

    def product(rows: Tensor, name: str) -> Tensor:
        bias = getattr(self, f"{name}_bias") if self.has_bias else None
        return by_provider(grouped_lora_linear, rows, stacks[name], ends, [], [], [], self.is_transposed, bias)[0]

    made = product(spread_rows(hidden_states, order, places, choices), first)
    made = self._apply_gate(made) if gated else self.act_fn(made)
    made = product(made, last) * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    return collect_rows(made, order, places, choices).to(hidden_states.dtype)


def _is_plain(self: Any, stacks: dict[str, Tensor], tokens: Tensor) -> bool:
    """Whether all is as the op has it: all experts are here, in the dtype of the tokens, and no norm follows."""
    if getattr(self, "_is_expert_parallel", False) or getattr(self, "has_post_expert_norm", False):
        return False
    if torch.is_autocast_enabled(tokens.device.type):
        return False
    return all(type(each.data) is Tensor and each.dtype == tokens.dtype for each in stacks.values())
