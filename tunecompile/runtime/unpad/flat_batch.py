"""One batch without its padding: [B, T] tokens as [1, N], and hidden states back as [B, T, H]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile.integrations.varlen_attention import LONGEST, OFFSETS, CannotFlatten
from tunecompile.runtime.unpad import refusals


@dataclass(frozen=True)
class FlatBatch:
    """The real tokens of one batch [B, T]."""

    index: Tensor  #: int64 [N]: the place of each token; beyond the last real token, place 0
    offsets: Tensor
    longest: Tensor
    real: int
    shape: tuple[int, int]

    @staticmethod
    def of(real: Tensor, count: int) -> FlatBatch:
        """From a bool mask of real tokens, [B, T], and their number."""
        rows, length = real.shape
        total = _rounded(count, real.device)
        order = torch.argsort((~real.flatten()).to(torch.int8), stable=True)[:count]  # no boolean sort on every device
        offsets = torch.cat(
            [real.new_zeros(1, dtype=torch.int64), real.sum(1).cumsum(0), torch.full((1,), total, device=real.device)]
        )
        longest = torch.empty(max(length, total - count, 2), 0, device=real.device)
        return FlatBatch(F.pad(order, (0, total - count)), offsets.to(torch.int32), longest, count, (rows, length))

    @staticmethod
    def packed(starts: Tensor, device: torch.device) -> FlatBatch:
        """From a bool mask [B, T] on the host of tokens that begin a sequence: every row's first token, and others."""
        count, total = starts.numel(), _rounded(starts.numel(), device)
        offsets = torch.cat([starts.flatten().nonzero()[:, 0], torch.tensor([count, total])])
        longest = torch.empty(max(int(offsets.diff().max()), 2), 0, device=device)
        return FlatBatch(
            F.pad(torch.arange(count, device=device), (0, total - count)),
            offsets.to(device, torch.int32),
            longest,
            count,
            tuple(starts.shape),
        )

    @property
    def gives_up(self) -> bool:
        """Whether hidden states at padding are not computed."""
        return self.real < self.shape[0] * self.shape[1]

    def flatten(self, values: Tensor) -> Tensor:
        """[B, T, ...] -> [1, N, ...]"""
        return values.flatten(0, 1).index_select(0, self.index)[None]

    def unflatten(self, values: Tensor) -> Tensor:
        """[1, N, ...] -> [B, T, ...], zero at padding."""
        rows, length = self.shape
        blank = values.new_zeros(rows * length, *values.shape[2:])
        return blank.index_copy(0, self.index[: self.real], values[0, : self.real]).unflatten(0, (rows, length))

    def inputs(self, kwargs: dict) -> dict:
        """The owner's arguments, flattened. Where the caller gives no positions, a token's position is its index in the
        row.
        """
        rows, length = self.shape
        tokens = {
            name: self.flatten(kwargs[name]) for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None
        }
        given = kwargs.get("position_ids")
        positions = self.index[None] % length if given is None else self.flatten(given.expand(rows, length))
        others = {name: value for name, value in kwargs.items() if name not in refusals.BOUNDARIES}
        return {
            **others,
            **tokens,
            "position_ids": positions,
            "attention_mask": None,
            OFFSETS: self.offsets,
            LONGEST: self.longest,
        }

    def outputs(self, output: Any) -> Any:
        """The owner's output in the padded shape: a tensor, tuple or transformers output, of hidden states alone."""
        if isinstance(output, Tensor):
            if output.dim() < 3 or output.shape[:2] != (1, len(self.index)):
                raise CannotFlatten("output-holds-more")
            return self.unflatten(output)
        if output is None:
            return None
        if isinstance(output, tuple):
            return type(output)(self.outputs(item) for item in output)
        if not hasattr(output, "items"):
            raise CannotFlatten("output-not-known", "", type(output).__name__)
        return type(output)(**{name: self.outputs(item) for name, item in output.items()})


def _rounded(count: int, device: torch.device) -> int:
    """Round up: every new size may cost a plan, or a recording."""
    multiple = 128 if device.type == "cuda" else 8
    return -(-count // multiple) * multiple
