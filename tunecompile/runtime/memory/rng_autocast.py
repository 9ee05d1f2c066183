"""Random state and autocast, on which a forward depends beside arguments and weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RngAutocastState:
    """torch's random state, on the host and on devices, and autocast."""

    devices: tuple[torch.device, ...]
    host: Tensor
    there: dict[torch.device, Tensor]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool

    @staticmethod
    def now(*devices: torch.device) -> RngAutocastState:
        kinds = dict.fromkeys((*(device.type for device in devices), "cpu"))
        autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        there = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}
        return RngAutocastState(devices, torch.get_rng_state(), there, autocast, torch.is_autocast_cache_enabled())

    def drawn_since(self) -> bool:
        """Whether random numbers were drawn since."""
        now = RngAutocastState.now(*self.devices)
        same = all(torch.equal(state, now.there[device]) for device, state in self.there.items())
        return not (same and torch.equal(self.host, now.host))

    def rewind(self) -> None:
        """Set the random state back to that moment."""
        torch.set_rng_state(self.host)
        for device, state in self.there.items():
            torch.cuda.set_rng_state(state, device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, in the backward pass, random state and autocast are those of that moment; afterwards those of now."""
        present = RngAutocastState.now(*self.devices)
        with ExitStack() as stack:
            stack.callback(present.rewind)
            stack.enter_context(torch.enable_grad())
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self.cached))
            self.rewind()
            yield
