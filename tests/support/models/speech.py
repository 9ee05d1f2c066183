"""Tiny models of speech, and batches for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support import zoo
from tests.support.batches import lengths_mask

#: sizes of an encoder and a decoder
SIDES = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
}


def whisper() -> nn.Module:
    import transformers as tf

    torch.manual_seed(0)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3)
    config = tf.WhisperConfig(
        vocab_size=256, d_model=64, num_mel_bins=16, max_source_positions=32, max_target_positions=64, **SIDES, **tokens
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


SOUND = 255  #: the token in the place of sounds
LINEARS = ("q_proj", "k_proj", "v_proj", "out_proj", "o_proj", "fc1", "fc2", "gate_proj", "up_proj", "down_proj")
_TEXT = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
_ENCODER = dict(
    num_mel_bins=16,
    encoder_layers=2,
    encoder_attention_heads=4,
    encoder_ffn_dim=128,
    d_model=64,
    max_source_positions=32,
)


def voxtral() -> nn.Module:
    import transformers as tf

    torch.manual_seed(0)
    side = dict(num_mel_bins=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, hidden_size=64)
    audio = {**side, "max_source_positions": 32, "head_dim": 16, "num_key_value_heads": 4}
    text = {**_TEXT, "model_type": "llama", "head_dim": 16}
    return tf.VoxtralForConditionalGeneration(
        tf.VoxtralConfig(audio_config=audio, text_config=text, audio_token_id=SOUND)
    )


def qwen2_audio() -> nn.Module:
    import transformers as tf

    torch.manual_seed(0)
    text = {**_TEXT, "model_type": "qwen2"}
    config = tf.Qwen2AudioConfig(audio_config=_ENCODER, text_config=text, audio_token_index=SOUND, audio_token_id=SOUND)
    return tf.Qwen2AudioForConditionalGeneration(config)


def qwen2_5_omni() -> nn.Module:
    """The part that listens, and writes text."""
    import transformers as tf

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    tokens = {"audio": SOUND, "image": 254, "video": 253}
    kinds = {f"{kind}_token_{what}": token for kind, token in tokens.items() for what in ("index", "id")}
    config = tf.Qwen2_5OmniThinkerConfig(
        audio_config={**_ENCODER, "n_window": 8, "output_dim": 64},
        vision_config=dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64),
        text_config={**_TEXT, "rope_parameters": rope},
        vision_start_token_id=252,
        vision_end_token_id=251,
        audio_start_token_id=250,
        position_id_per_seconds=25,
        **kinds,
    )
    return tf.Qwen2_5OmniThinkerForConditionalGeneration(config)


def heard(tokens: tuple[int, ...], frames: tuple[int, ...] | None = None, seed: int = 1) -> dict[str, Tensor]:
    """A batch of text behind sounds.

    tokens: how many each row's sound takes; frames: how long it is, where models are told.
    """
    ids = zoo.batch(250, len(tokens), 24, seed=seed)["input_ids"]
    for row, count in enumerate(tokens):
        ids[row, 2 : 2 + count] = SOUND
    sounds = torch.randn(len(tokens), 16, 64, generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == SOUND, -100), "input_features": sounds}
    batch["attention_mask"] = torch.ones_like(ids)
    if frames is not None:
        batch["feature_attention_mask"] = lengths_mask(*frames, length=64)
    return batch


#: name -> (model, batches)
MODELS = {
    "whisper": (whisper, lambda: batches()[:3]),
    "voxtral": (voxtral, lambda: [heard((8, 8)), heard((8, 8, 8), seed=2)]),
    "qwen2_audio": (qwen2_audio, lambda: [heard((16, 16), (64, 64)), heard((16, 16, 16), (64,) * 3, seed=2)]),
    "qwen2_5_omni": (qwen2_5_omni, lambda: [heard((16, 10), (64, 40)), heard((7, 16, 5), (30, 64, 22), seed=2)]),
}
