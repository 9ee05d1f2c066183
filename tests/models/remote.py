"""A small model whose code is saved beside its weights, as those of the hub that want `trust_remote_code`. transformers copies this very file."""

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutput


class RemoteConfig(PreTrainedConfig):
    model_type = "tunecompile_remote"

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 64,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        **options,
    ):
        self.vocab_size, self.hidden_size, self.num_hidden_layers, self.num_attention_heads = (
            vocab_size,
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
        )
        super().__init__(**options)


class Block(nn.Module):
    def __init__(self, config: RemoteConfig):
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(width, 2 * width, bias=False),
            nn.Linear(width, 2 * width, bias=False),
            nn.Linear(2 * width, width, bias=False),
        )

    def forward(self, x):
        h = self.norm_1(x)
        q, k, v = (
            part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class RemoteForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = RemoteConfig

    def __init__(self, config: RemoteConfig):
        super().__init__(config)
        self.embed, self.norm = (
            nn.Embedding(config.vocab_size, config.hidden_size),
            nn.RMSNorm(config.hidden_size, eps=1e-5),
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, labels=None, **_):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = (
            None
            if labels is None
            else nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        )
        return CausalLMOutput(loss=loss, logits=logits)


def save(folder: str | Path) -> None:
    """A checkpoint with this code beside it."""
    torch.manual_seed(0)
    RemoteConfig.register_for_auto_class()
    RemoteForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    RemoteForCausalLM(RemoteConfig()).save_pretrained(folder)
