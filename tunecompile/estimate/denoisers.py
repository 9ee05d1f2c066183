"""Diffusion transformers of diffusers, by the names that `plan` accepts, on the meta device."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile.errors import need

FLUX, QWEN, WAN = "FluxTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel"
#: name -> its class in diffusers, and its config where that differs from the class's own
DENOISERS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux.1-dev": (FLUX, {"guidance_embeds": True}),
    "qwen-image": (QWEN, {}),
    "wan-2.1-1.3b": (WAN, {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}),
}
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
        """Return the prediction. tokens: [rows, length], of which the shape counts alone."""
        rows, length = tokens.shape
        height = next(side for side in range(math.isqrt(length), 0, -1) if length % side == 0)

        def blank(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self.dtype, device=tokens.device)

        given = arguments(self.transformer, rows, (1, height, length // height), CAPTION, blank)
        return self.transformer(**given, return_dict=False)[0]


def arguments(
    transformer: nn.Module, rows: int, grid: tuple[int, int, int], caption: int, make: Callable[..., Tensor]
) -> dict[str, Any]:
    """Return what a transformer of a class of `DENOISERS` is called with, by name.

    Args:
        transformer: of diffusers, with its `config`.
        rows: images or videos.
        grid: frames, height and width in tokens.
        caption: tokens of it.
        make: gives a tensor of a shape, on the device of the model.
    """
    config, kind, (frames, height, width) = transformer.config, type(transformer).__name__, grid
    given: dict[str, Any] = {"timestep": make(rows)}
    if kind == WAN:
        _, down, across = config.patch_size
        given["hidden_states"] = make(rows, config.in_channels, frames, down * height, across * width)
        return given | {"encoder_hidden_states": make(rows, caption, config.text_dim)}
    given["hidden_states"] = make(rows, math.prod(grid), config.in_channels)
    given["encoder_hidden_states"] = make(rows, caption, config.joint_attention_dim)
    if kind == QWEN:
        return given | {"img_shapes": [[grid]] * rows}
    places = [torch.arange(size, device=given["timestep"].device) for size in grid]
    given["img_ids"] = torch.cartesian_prod(*places).float()
    given["txt_ids"] = torch.zeros_like(given["img_ids"])[:1].repeat(caption, 1)
    return given | {"pooled_projections": make(rows, config.pooled_projection_dim), "guidance": make(rows)}


def denoiser(name: str, dtype: torch.dtype) -> Denoiser:
    """Return a model of `DENOISERS` on the meta device, nothing trained.

    Raises:
        MissingExtra: diffusers is not installed.
    """
    need(f"a plan of {name}", "test", "diffusers")
    import diffusers

    kind, changes = DENOISERS[name]
    with torch.device("meta"):
        made = getattr(diffusers, kind)(**changes)
    for module in made.modules():
        # tables of positions, which are no buffers
        if any(isinstance(value, Tensor) for value in vars(module).values()):
            of = {name: vars(module)[name] for name in inspect.signature(type(module)).parameters}
            module.__init__(**of)  # again: they have to have values
    return Denoiser(nn.Module.to(made, dtype).requires_grad_(False), dtype)  # diffusers' own `to` warns
