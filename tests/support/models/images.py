"""Models that read images beside text, an encoder, and an encoder-decoder, with a batch for each."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.support import zoo
from tests.support.models.pairs import without_mlps

tf = pytest.importorskip("transformers")

IMAGE = 250  #: the token that an image's features take the place of
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
TEXT = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QWEN_VISION = dict(
    depth=3,
    hidden_size=32,
    intermediate_size=64,
    num_heads=2,
    out_hidden_size=64,
    patch_size=4,
    spatial_merge_size=2,
    temporal_patch_size=2,
)
QWEN_TOKENS = dict(image_token_id=IMAGE, video_token_id=251, vision_start_token_id=252, vision_end_token_id=253)


def with_image(*tokens: int, **inputs: torch.Tensor) -> dict:
    """A batch whose rows hold these tokens, which are not predicted, and what else the model takes."""
    made = zoo.batch(vocabulary=200)
    made["input_ids"][:, 2 : 2 + len(tokens)] = torch.tensor(tokens)
    made["labels"][:, 2 : 2 + len(tokens)] = -100
    return {**made, **inputs}


def qwen_images() -> dict:
    made = with_image(
        252, *[IMAGE] * 4, 253, pixel_values=torch.randn(32, 96), image_grid_thw=torch.tensor([[1, 4, 4]] * 2)
    )
    return {**made, "mm_token_type_ids": (made["input_ids"] == IMAGE).int()}


def images_of(grids: list[tuple[int, int, int]], dtype: torch.dtype = torch.float32) -> dict:
    """A batch with an image of (frames, height, width) patches in each row."""
    features = [frames * height * width // 4 for frames, height, width in grids]
    generator = torch.Generator().manual_seed(sum(features))
    ids = torch.randint(3, 200, (len(grids), max(features) + 14), generator=generator)
    labels = ids.clone()
    for row, count in enumerate(features):
        ids[row, 2 : count + 4] = torch.tensor([252, *[IMAGE] * count, 253])
        labels[row, : count + 4] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(4 * sum(features), 96, generator=generator).to(dtype),
        "image_grid_thw": torch.tensor(grids),
    }


#: images of ten sizes, two or one in a batch
GRIDS = [
    [(1, 4, 4)] * 2,
    [(1, 6, 4), (1, 4, 8)],
    [(1, 8, 8), (1, 2, 2)],
    [(1, 2, 4), (1, 4, 2)],
    [(2, 4, 4), (1, 6, 6)],
    [(1, 12, 6), (1, 4, 4)],
    [(1, 2, 2)] * 2,
    [(1, 6, 10)],
    [(1, 10, 10), (1, 2, 6)],
    [(1, 16, 4), (2, 4, 2)],
]


def modernbert():
    config = tf.ModernBertConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=256,
        local_attention=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    return tf.ModernBertForMaskedLM(config), zoo.batch(), ["Wqkv", "Wo", "Wi"]


def t5():
    config = tf.T5Config(
        vocab_size=256,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return tf.T5ForConditionalGeneration(config), zoo.batch(), ["q", "k", "v", "o", "wi_0", "wi_1", "wo"]


def qwen2_5_vl():
    config = tf.Qwen2_5_VLConfig(
        text_config={**zoo.SMALL, "rope_parameters": {**ROTARY, "mrope_section": [2, 3, 3]}},
        vision_config={**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
        **QWEN_TOKENS,
    )
    return tf.Qwen2_5_VLForConditionalGeneration(config), qwen_images(), [*TEXT, "qkv", "proj"]


def qwen3_vl():
    config = tf.Qwen3VLConfig(
        text_config={
            **zoo.SMALL,
            "head_dim": 16,
            "rope_parameters": {**ROTARY, "mrope_section": [2, 3, 3], "mrope_interleaved": True},
        },
        vision_config={**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        **QWEN_TOKENS,
    )
    return tf.Qwen3VLForConditionalGeneration(config), qwen_images(), [*TEXT, "qkv", "proj", "linear_fc1", "linear_fc2"]


def gemma3():
    vision = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=4
    )
    config = tf.Gemma3Config(
        text_config={**zoo.SMALL, "head_dim": 16},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=252,
        eoi_token_index=253,
    )
    inputs = with_image(252, *[IMAGE] * 4, 253, pixel_values=torch.randn(2, 3, 16, 16))
    return (
        tf.Gemma3ForConditionalGeneration(config),
        {**inputs, "token_type_ids": (inputs["input_ids"] == IMAGE).long()},
        [*TEXT, "fc1", "fc2"],
    )


def mllama():
    """Every second layer of the language model reads the image, and is of another class."""
    vision = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_global_layers=2,
        attention_heads=2,
        image_size=16,
        patch_size=4,
        max_num_tiles=2,
        vision_output_dim=96,
        intermediate_layers_indices=[0, 1],
        supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]],
    )
    text = {
        **zoo.SMALL,
        "num_hidden_layers": 4,
        "cross_attention_layers": [1, 3],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": ROTARY,
    }
    seen = torch.zeros(2, 16, 1, 2, dtype=torch.long)
    seen[:, 2:, :, 0] = seen[1, 2:] = 1
    inputs = with_image(
        IMAGE,
        pixel_values=torch.randn(2, 1, 2, 3, 16, 16),
        aspect_ratio_ids=torch.tensor([[1], [2]]),
        aspect_ratio_mask=torch.tensor([[[1, 0]], [[1, 1]]]),
        cross_attention_mask=seen,
    )
    return (
        tf.MllamaForConditionalGeneration(
            tf.MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
        ),
        inputs,
        [*TEXT, "fc1", "fc2"],
    )


#: model -> (linears with adapters in one layer of each kind, rotations, layers in each region)
MODELS = {
    modernbert: (8, 4, [1, 2]),
    t5: (36, 0, [1, 2, 1, 2]),
    qwen2_5_vl: (12, 4, [3, 3]),
    qwen3_vl: (13, 4, [3, 2, 3]),
    gemma3: (12, 2, [3, 3]),
    mllama: (26, 2, [2, 2, 2, 2]),
}


def adapted(make, *few: str) -> tuple[nn.Module, dict]:
    """(the model under LoRA, a batch), the same each time.

    few: linears with adapters, where it does not matter which: graphs are half as large.
    """
    torch.manual_seed(0)
    model, inputs, targets = make()
    for parameter in model.parameters():  # gates and projections that begin at zero let no gradient through
        if parameter.dim() and not parameter.any():
            nn.init.normal_(parameter, std=0.3)
    targets = [*few] or targets
    return zoo.adapt(model, target_modules=targets, task_type="SEQ_2_SEQ_LM" if make is t5 else None), inputs


def attending(model: nn.Module) -> nn.Module:
    """The model, whose layers of text do nothing but attend: these are traced twice as fast."""
    without_mlps(model.get_base_model().model.language_model)
    return model


def padded(inputs: dict) -> dict:
    """The same batch, whose second row ends early."""
    made = {**copy.deepcopy(inputs), "attention_mask": torch.ones_like(inputs["input_ids"])}
    made["attention_mask"][1, 12:], made["labels"][1, 12:] = 0, -100
    return made
