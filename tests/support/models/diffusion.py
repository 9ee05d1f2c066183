"""Tiny diffusion transformers of diffusers with adapters, and batches of any size: images or videos, texts, rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")

#: 64 columns: bitsandbytes' blocks of NF4 are whole rows
LAYERS, HEADS = 3, dict(attention_head_dim=32, num_attention_heads=2)
TEXT = dict(joint_attention_dim=24)
#: linears, as PEFT matches ends of names
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
TARGETS += ["net.0.proj", "net.2", "proj_mlp", "proj_out"]


def flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=LAYERS,
        num_single_layers=LAYERS,
        pooled_projection_dim=20,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
        **HEADS,
        **TEXT,
    )


def qwen_image() -> nn.Module:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=LAYERS, axes_dims_rope=(8, 12, 12), **HEADS, **TEXT
    )


def wan() -> nn.Module:
    return diffusers.WanTransformer3DModel(
        in_channels=4,
        out_channels=4,
        text_dim=24,
        freq_dim=32,
        ffn_dim=128,
        num_layers=LAYERS,
        rope_max_seq_len=32,
        **HEADS,
    )


def sd3() -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        num_layers=LAYERS,
        caption_projection_dim=64,
        pooled_projection_dim=20,
        pos_embed_max_size=32,
        qk_norm="rms_norm",
        **HEADS,
        **TEXT,
    )


MODELS = (flux, qwen_image, wan, sd3)


def in_nf4(model: nn.Module) -> nn.Module:
    """The model with its linears in NF4."""
    from benchmarks.steps.diffusion import pack

    pack(model, torch.float32)
    return model


def adapted(make: Any, pack: Callable[[nn.Module], nn.Module] | None = None, **more: Any) -> nn.Module:
    """The model with random weights, and adapters whose B is not 0, as diffusers' scripts add them.

    pack: makes its weights those of 4 bits."""
    torch.manual_seed(0)
    model = make()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() < 2 else 0.0, 0.1)
    model = pack(model) if pack else model
    model.requires_grad_(False)
    model.add_adapter(peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **more}))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, 0.0, 0.1)
    return model.train()


def batch(make: Any, rows: int = 2, height: int = 4, width: int = 4, text: int = 6) -> tuple[dict, Tensor]:
    """What the model is called with, and the noise that it is to predict."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    kwargs: dict[str, Any] = dict(encoder_hidden_states=random(rows, text, 24), return_dict=False)
    kwargs["timestep"] = torch.arange(1.0, rows + 1) / 8  # whose thousandfold bf16 holds: of others it is far off
    if make in (wan, sd3):
        shape = (rows, 4, 2 * height, 2 * width) if make is sd3 else (rows, 4, 3, 2 * height, 2 * width)
        kwargs["hidden_states"], noise = random(*shape), random(*shape)
    else:
        kwargs["hidden_states"], noise = random(rows, height * width, 16), random(rows, height * width, 16)
    if make in (flux, sd3):
        kwargs["pooled_projections"] = random(rows, 20)
    if make is flux:
        places = torch.cartesian_prod(torch.zeros(1), *(torch.arange(float(side)) for side in (height, width)))
        kwargs |= dict(img_ids=places, txt_ids=torch.zeros(text, 3), guidance=torch.full((rows,), 4.0))
    if make is qwen_image:
        mask = torch.ones(rows, text, dtype=torch.long)
        mask[1:, -2:] = 0
        kwargs |= dict(img_shapes=[[(1, height, width)]] * rows, encoder_hidden_states_mask=mask)
    return kwargs, noise


def step(model: nn.Module, inputs: tuple[dict, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean squared error of the predicted noise, in fp32, and gradients of what is trained."""
    kwargs, noise = inputs
    dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
    model.zero_grad(set_to_none=True)
    predicted = model(**{name: _in(item, dtype) for name, item in kwargs.items()})[0]
    loss = nn.functional.mse_loss(predicted.float(), noise)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _in(item: Any, dtype: torch.dtype) -> Any:
    return item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item
