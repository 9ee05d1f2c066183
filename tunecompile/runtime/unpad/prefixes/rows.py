"""A forest's tokens as whole rows, for recurrences: each reads its row from the first token on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tunecompile.runtime.unpad.prefixes.forest import Forest
from tunecompile.runtime.unpad.sizes import rounded_to


class BranchRows(NamedTuple):
    """As ops take them. R: the rows' tokens, and what fills them up, which is a row of its own."""

    offsets: Tensor  #: int [rows + 2], where rows begin, and what fills them up
    rows: Tensor  #: int [R]; this and the others: see `ops.branch_rows`
    own: Tensor  #: int [2, N]
    again: Tensor  #: int [K, M]

    @staticmethod
    def of(forest: Forest, total: int, multiple: int) -> BranchRows:
        """The rows of a forest, on the host.

        Args:
            forest: of the rows.
            total: N, with what fills it up.
            multiple: what R and M are rounded up to.
        """
        count = len(forest.tokens)
        # More than N: a graph would take equal sizes for one.
        rows = torch.full((max(rounded_to(count, multiple), total + multiple),), -1, device="cpu")
        rows[:count] = forest.tokens
        first = forest.copies == 0
        own = torch.full((2, total), -1, device="cpu")
        own[0, forest.tokens[first]] = first.nonzero()[:, 0]
        further = (~first).nonzero()[:, 0]
        shared = forest.tokens[forest.copies == 1]
        own[1, shared] = torch.arange(len(shared), device="cpu")
        most = max(int(forest.copies.max()), 2)  # one would be a constant of the graph
        again = torch.full((most, rounded_to(len(shared), multiple)), -1, device="cpu")
        again[forest.copies[further] - 1, own[1, forest.tokens[further]]] = further
        offsets = torch.tensor([*forest.begins, len(rows)], device="cpu")
        return BranchRows(offsets, rows, own, again)
