"""A forest on the device: the tokens of a batch that its documents are made of, and the batch of what layers return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tunecompile.runtime.unpad.prefixes.forest import Forest
from tunecompile.runtime.unpad.prefixes.rows import BranchRows
from tunecompile.runtime.unpad.sizes import multiple_on, power_of_two, rounded_to


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Tokens of a batch [B, T], each of them once. N: the documents' tokens, and what fills them up."""

    forest: Forest
    index: Tensor  #: int64 [N], the place of each token in the batch, in the first row that has it
    offsets: Tensor  #: int32 [S + 1], where documents begin
    tree: Tensor  #: int32 [2, S], parents and ends
    places: Tensor  #: int32 [N], in their rows
    padding: Tensor  #: bool [B * T]
    tokens: Tensor  #: int64 [B * T], for each place of the batch its token; 0 at padding
    #: for the second rows that have a token, the third, and so on: their places in the batch, and the tokens
    again: tuple[tuple[Tensor, Tensor], ...]
    rows: BranchRows | None = None  #: for recurrences; None where layers have none

    @staticmethod
    def of(forest: Forest, real: Tensor, device: torch.device, recurs: bool = False) -> SharedPrefixes:
        """Bring a forest to a device.

        Args:
            forest: of the batch's rows.
            real: bool [B, T], on the host: which places of the batch its tokens are, in order.
            device: of the layers.
            recurs: whether layers have recurrences, which read whole rows.
        """
        count, found = forest.count, real.flatten().nonzero()[:, 0]
        total = rounded_to(count, multiple_on(device))
        # One document fills up. Others are empty: their number changes with the batch, and may cost a recording.
        documents = power_of_two(len(forest.parents) + 1)
        order = torch.argsort(forest.copies, stable=True)
        sizes = torch.bincount(forest.copies).tolist()
        parts = list(zip(found[order].split(sizes), forest.tokens[order].split(sizes)))
        index = torch.zeros(total, dtype=torch.int64, device="cpu")
        index[parts[0][1]] = parts[0][0]
        tokens = torch.zeros(real.numel(), dtype=torch.int64, device="cpu")
        tokens[found] = forest.tokens
        missing = documents - len(forest.parents)
        lengths = torch.tensor(forest.starts, device="cpu").diff()
        shifts = torch.tensor(forest.depths, device="cpu") - torch.tensor(forest.starts[:-1], device="cpu")
        places = torch.arange(total, device="cpu")
        places[:count] += shifts.repeat_interleave(lengths)
        offsets = [*forest.starts, *[total] * missing]
        tree = [*forest.parents, *[-1] * missing, *forest.ends, *[total] * missing]
        again = [each for pair in parts[1:] for each in pair]
        wide = _together([index, tokens, *again], device)
        narrow = [torch.tensor(offsets, device="cpu"), torch.tensor(tree, device="cpu").view(2, documents), places]
        narrow += BranchRows.of(forest, total, multiple_on(device)) if recurs else ()
        # graphs require that their inputs share no memory
        narrow = [part.clone() for part in _together(narrow, device, torch.int32)]
        return SharedPrefixes(
            forest,
            wide[0],
            narrow[0],
            narrow[1],
            narrow[2],
            (~real).flatten().to(device),
            wide[1],
            tuple(zip(wide[2::2], wide[3::2])),
            BranchRows(*narrow[3:]) if recurs else None,
        )

    def batch_of(self, values: Tensor) -> Tensor:
        """[N, ...] -> [B * T, ...]: each row has its copy of a prefix; zero at padding."""
        return _Copies.apply(values, self)


def _together(parts: list[Tensor], device: torch.device, dtype: torch.dtype = torch.int64) -> list[Tensor]:
    """Several lists of numbers on a device, by one copy."""
    whole = torch.cat([part.flatten() for part in parts]).to(dtype)
    whole = (whole.pin_memory() if device.type == "cuda" else whole).to(device, non_blocking=True)
    return [piece.view(part.shape) for piece, part in zip(whole.split([part.numel() for part in parts]), parts)]


class _Copies(torch.autograd.Function):
    """Copies of tokens. Their gradients are summed in fp32 and in the order of rows, so that two runs are equal."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shared: SharedPrefixes) -> Tensor:
        ctx.shared = shared
        copied = values.index_select(0, shared.tokens)
        return copied.masked_fill_(shared.padding.view(-1, *[1] * (values.dim() - 1)), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shared: SharedPrefixes = ctx.shared
        total = grad.index_select(0, shared.index).to(torch.promote_types(grad.dtype, torch.float32))
        for places, tokens in shared.again:
            total.index_add_(0, tokens, grad.index_select(0, places).to(total.dtype))
        total[shared.forest.count :] = 0
        return total.to(grad.dtype), None
