"""Diffusion transformers of diffusers, by the names that `plan` accepts, on the meta device."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile.errors import MissingExtra

#: name -> its class in diffusers, and its config where that differs from the class's own
DENOISERS: dict[str, tuple[str, dict[str, Any]]] = {"flux.1-dev": ("FluxTransformer2DModel", {"guidance_embeds": True})}
#: linears of blocks that get adapters, as diffusers' LoRA scripts have them
TARGETS = (
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("net.0.proj", "net.2"),
)
CAPTION = 512  #: tokens


class Denoiser(nn.Module):
    """A transformer of images as a function of tokens: their number is the image's, beside a caption."""

    def __init__(self, transformer: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.transformer, self.dtype = transformer, dtype

    def get_input_embeddings(self) -> None:
        """Return None: there is no table of words."""

    get_output_embeddings = get_input_embeddings  # nor a head

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the prediction [rows, length, channels]. tokens: [rows, length], of which the shape counts alone."""
        (rows, length), config = tokens.shape, self.transformer.config

        def blank(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self.dtype, device=tokens.device)

        return self.transformer(
            hidden_states=blank(rows, length, config.in_channels),
            encoder_hidden_states=blank(rows, CAPTION, config.joint_attention_dim),
            pooled_projections=blank(rows, config.pooled_projection_dim),
            timestep=blank(rows),
            guidance=blank(rows),
            img_ids=blank(length, 3),
            txt_ids=blank(CAPTION, 3),
            return_dict=False,
        )[0]


def denoiser(name: str, dtype: torch.dtype) -> Denoiser:
    """Return a model of `DENOISERS` on the meta device, nothing trained.

    Raises:
        MissingExtra: diffusers is not installed.
    """
    if importlib.util.find_spec("diffusers") is None:
        raise MissingExtra(what=f"a plan of {name}", package="diffusers", extra="test")
    import diffusers

    kind, changes = DENOISERS[name]
    with torch.device("meta"):
        made = getattr(diffusers, kind)(**changes)
    return Denoiser(nn.Module.to(made, dtype).requires_grad_(False), dtype)  # diffusers' own `to` warns
