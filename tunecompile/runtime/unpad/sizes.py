"""Numbers of tokens: those that batches came with, and what they are rounded up to."""

from __future__ import annotations

import torch

from tunecompile.runtime.cuda_graphs.replay import GraphReplays

PARTS = 8  #: of the numbers between a power of two and the next: at most one part, or a multiple, is filled up
FINE_PARTS = 16  #: the same of rows that came with padding, whose numbers recur
RECORDED = 2048  #: tokens of a row up to which launches are waited for, and so recorded


def multiple_on(device: torch.device) -> int:
    """What numbers of tokens are rounded up to multiples of: every new size may cost a plan, or a recording."""
    return 128 if device.type == "cuda" else 8


def launched_for(longest: int, total: int, multiple: int, waits: bool = False) -> int:
    """The longest document of a row, as kernels are launched for. Of short rows each further one costs a recording, and
    a power of two little: 240 batches of two rows of about 240 tokens have 15 sizes in place of 25.

    waits: whether launches are known to be waited for, however short the row is.
    """
    if total > RECORDED and not waits:
        return rounded_to(longest, multiple)
    return min(power_of_two(max(longest, multiple)), total)


def power_of_two(count: int) -> int:
    """The next one."""
    return 1 << (count - 1).bit_length()


def rounded_up(count: int, device: torch.device, parts: int = PARTS) -> int:
    """The size that a batch of so many tokens is filled up to, of so many between a power of two and the next."""
    return rounded_to(count, max(multiple_on(device), (1 << count.bit_length() - 1) // parts))


def rounded_to(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple


class SizesSeen:
    """Sizes that an owner's batches came in: which has a graph of its own, and whose launches are waited for."""

    def __init__(self, replays: GraphReplays | None):
        self.replays = replays
        self.waits = 0  #: the largest number of tokens whose launches are known to be waited for
        self.computes: float = float("inf")  #: the smallest whose are not
        self.first: tuple[int, ...] | None = None  #: of the first batch that came as it is
        self.apart = False  #: whether others did, which have a graph of their own

    @property
    def waited(self) -> float:
        """Tokens of a row below which launches are waited for, as far as is known."""
        return self.computes if self.waits else 0

    def came(self, size: tuple[int, ...], trains: bool) -> None:
        """A batch comes as it is."""
        if trains:
            self.first = self.first or size
            self.apart |= self.first != size

    def recording_pays(self, size: tuple[int, ...], tokens: int, device: torch.device) -> bool:
        """Whether a size has no graph of its own, and launches of so many tokens are waited for, as far as is known."""
        if self.first is None or self.first == size:
            return False
        if self.replays is None or self.replays.closed or tokens >= self.computes:
            return False
        return self.waits > 0 or device.type == self.replays.device

    def learn(self, tokens: int) -> None:
        """A layer ran on so many."""
        waits = None if self.replays is None else self.replays.last_waits()
        if waits:
            self.waits = max(self.waits, tokens)
            self.computes = self.computes if tokens < self.computes else float("inf")
        elif waits is not None:
            self.computes = min(self.computes, tokens)
