"""A tiny model of speech, and batches for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support import zoo


def whisper() -> nn.Module:
    import transformers as tf

    torch.manual_seed(0)
    sides = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
    }
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3)
    config = tf.WhisperConfig(
        vocab_size=256, d_model=64, num_mel_bins=16, max_source_positions=32, max_target_positions=64, **sides, **tokens
    )
    config.suppress_tokens = config.begin_suppress_tokens = None
    return tf.WhisperForConditionalGeneration(config)


def batches() -> list[dict[str, Tensor]]:
    """Sounds are always as long as the encoder wants them; what is said is not."""
    made = []
    for seed, (rows, target) in enumerate(((2, 12), (3, 20), (4, 9), (5, 16), (2, 12)), start=1):
        sounds = torch.randn(rows, 16, 64, generator=torch.Generator().manual_seed(seed))
        labels = zoo.batch(256, rows, target, seed=seed)["input_ids"]
        if seed in (2, 3):
            labels[1:, target // 2 :] = -100
        made.append({"input_features": sounds, "labels": labels})
    return made
