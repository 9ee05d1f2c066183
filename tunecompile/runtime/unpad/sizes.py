"""What numbers of tokens are rounded up to: every new size may cost a plan, or a recording."""

from __future__ import annotations

import torch

PARTS = 8  #: of the numbers between a power of two and the next: at most one part, or a multiple, is filled up
RECORDED = 2048  #: tokens of a row up to which launches are waited for, and so recorded


def multiple_on(device: torch.device) -> int:
    """What numbers of tokens are rounded up to multiples of: every new size may cost a plan, or a recording."""
    return 128 if device.type == "cuda" else 8


def launched_for(longest: int, total: int, multiple: int) -> int:
    """The longest document of a row, as kernels are launched for. Of short rows each further one costs a recording, and
    a power of two little: 240 batches of two rows of about 240 tokens have 15 sizes in place of 25.
    """
    if total > RECORDED:
        return rounded_to(longest, multiple)
    return min(power_of_two(max(longest, multiple)), total)


def power_of_two(count: int) -> int:
    """The next one."""
    return 1 << (count - 1).bit_length()


def rounded_up(count: int, device: torch.device) -> int:
    """The size that a batch of so many tokens is filled up to."""
    part = max(multiple_on(device), (1 << count.bit_length() - 1) // PARTS)
    return rounded_to(count, part)


def rounded_to(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple
