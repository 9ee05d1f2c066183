"""What a GPU can do: the one place where compute capability, shared memory and memory are looked up.

`TUNECOMPILE_AS=rtx4090` makes the GPU of this process behave as a smaller one: providers, tiles, attention's kernels,
the planner's rates and the memory are those of the card of that name, while kernels are compiled for the GPU that is
there. So choices and results on a card can be tested without one. Speeds mean nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

VARIABLE = "TUNECOMPILE_AS"
AMPERE = (8, 0)
USABLE = 0.985  #: share of the datasheet's memory that torch reports
ECC = 0.925  #: the same where error correction takes part of the memory
LDS = 65536  #: bytes of AMD's cards, which is also what NVIDIA's oldest ones have
#: bytes of shared memory that a program may take, by compute capability (CUDA programming guide, technical
#: specifications); `LDS` elsewhere
SHARED = {(8, 0): 166912, (8, 6): 101376, (8, 7): 166912, (8, 9): 101376, (9, 0): 232448}
SHARED |= {(10, 0): 232448, (10, 3): 232448, (11, 0): 232448, (12, 0): 101376, (12, 1): 101376}
RUN, EMULATED, COMPILED, NOTHING = "run", "emulated", "compiled", "not tried"
#: what was shown on which NVIDIA cards, by compute capability (docs/pages/reference/hardware.md)
SHOWN = {(9, 0): RUN, (7, 5): EMULATED, (8, 6): EMULATED, (8, 9): EMULATED, (12, 0): EMULATED}
SHOWN |= {(8, 0): COMPILED, (10, 0): COMPILED}
SHOWN_ON_AMD = {"gfx942": COMPILED, "gfx1100": COMPILED}  #: the same by architecture


@dataclass(frozen=True)
class Card:
    """What choices depend on, of one type of GPU."""

    capability: tuple[int, int]
    memory: int  #: bytes that torch reports


def _card(capability: tuple[int, int], gib: float, ecc: bool = False) -> Card:
    return Card(capability, int((ECC if ecc else USABLE) * gib * 2**30))


#: by the name that `--gpu` and `TUNECOMPILE_AS` take
CARDS = {
    "b200": _card((10, 0), 180),
    "h200": _card((9, 0), 141),
    "h100": _card((9, 0), 80),
    "h100-pcie": _card((9, 0), 80),
    "h100-nvl": _card((9, 0), 94),
    "a100-80": _card((8, 0), 80),
    "a100-40": _card((8, 0), 40),
    "l40s": _card((8, 9), 48, ecc=True),
    "l4": _card((8, 9), 24, ecc=True),
    "a10": _card((8, 6), 24, ecc=True),
    "t4": _card((7, 5), 16, ecc=True),
    "rtx6000-ada": _card((8, 9), 48, ecc=True),
    "rtx5090": _card((12, 0), 32),
    "rtx4090": _card((8, 9), 24),
    "rtx3090": _card((8, 6), 24),
}
_acting: contextvars.ContextVar[Card | None] = contextvars.ContextVar("acting", default=None)


@contextlib.contextmanager
def acting_as(name: str | None) -> Iterator[None]:
    """Inside, all tensors count as tensors of a card, also where there is no GPU. name: None for no card."""
    before = _acting.set(None if name is None else CARDS[name])
    try:
        yield
    finally:
        _acting.reset(before)


def emulated() -> str:
    """The name of the card that this process's GPU is to behave as; empty for none."""
    return os.environ.get(VARIABLE, "").strip().lower()


def _stand_in() -> Card | None:
    """The card in place of the GPU, if there is one."""
    return _acting.get() or CARDS.get(emulated())


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability that choices are made for; None without a GPU."""
    found, card = compiled_for(device), _stand_in()
    return found if found is None or card is None else card.capability


def compiled_for(device: torch.device) -> tuple[int, int] | None:
    """The compute capability that kernels are compiled for, by which faults of compilers are asked.

    It is that of the GPU that runs, also where it behaves as another card; inside `acting_as`, where nothing runs, that
    of the card; None without a GPU.
    """
    if (acting := _acting.get()) is not None:
        return acting.capability
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.cuda.is_available() else None


def shown_on(device: torch.device) -> str:
    """What was shown on cards like a GPU that is there: one of `RUN`, `EMULATED`, `COMPILED` and `NOTHING`."""
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return SHOWN_ON_AMD.get(name, NOTHING)
    return SHOWN.get(torch.cuda.get_device_capability(device), NOTHING)


def older_than(device: torch.device, least: tuple[int, int]) -> bool:
    """Whether a device is a GPU of a smaller compute capability."""
    found = capability(device)
    return found is not None and found < least


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16, other than by way of fp32."""
    return not older_than(device, AMPERE)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take; 0 without a GPU."""
    found = capability(device)
    return 0 if found is None else LDS if torch.version.hip else SHARED.get(found, LDS)


def warp_size(device: torch.device) -> int:
    """Threads of a warp: 32, or 64 on AMD's data centre cards."""
    return torch.cuda.get_device_properties(device).warp_size if torch.version.hip and device.type == "cuda" else 32


def total_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory, as torch reports them."""
    card, real = _stand_in(), torch.cuda.get_device_properties(device).total_memory
    return real if card is None else min(card.memory, real)


def hold_to_memory(device: torch.device, outside: int) -> None:
    """Limit torch's allocator to the memory of the card in its place, if there is one.

    Args:
        device: a GPU.
        outside: bytes that the process takes beside the allocator.
    """
    if CARDS.get(emulated()) is None:
        return
    share = (total_memory(device) - outside) / torch.cuda.get_device_properties(device).total_memory
    held = torch.cuda.get_per_process_memory_fraction(device)
    if share < held:
        torch.cuda.set_per_process_memory_fraction(share, device)
