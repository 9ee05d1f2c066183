"""The rows of hidden states that TRL's fused head scores, without a wait for the device.

TRL selects rows that have a label by `hidden[mask]` and `labels[mask]`: for the size of both the host waits until the
device is done with the whole backbone, and the device then stands idle. (DPO of an 8B, 4 pairs: 50 of 700 ms on
an H100, in which PEFT switches adapters.) Their number is known from the labels alone, long before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tunecompile._torch.cuda import start_copy_to_host, where_set

IGNORED = -100


@dataclass(frozen=True)
class LabelledRows:
    """Of one call of the fused forward."""

    labels: Tensor  #: int64 [N]: of all rows
    count: Tensor  #: how many have one, on its way to the host
    arrived: torch.cuda.Event | None  #: None where it is on the host

    @staticmethod
    def of(kwargs: dict[str, Any]) -> LabelledRows | None:
        """Have the device count them; None where the call has no labels [B, T] of its own."""
        shifted, labels = kwargs.get("shift_labels"), kwargs.get("labels")
        labels = labels[:, 1:] if shifted is None and isinstance(labels, Tensor) and labels.dim() == 2 else shifted
        if type(labels) is not Tensor or labels.dim() != 2:
            return None
        labels = labels.reshape(-1)
        count = (labels != IGNORED).sum()
        return LabelledRows(labels, *(start_copy_to_host(count) if count.is_cuda else (count, None)))

    def places(self) -> Tensor:
        """int64 [M]: the rows that have a label, in order. The host waits for nothing behind the call's beginning."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return where_set(self.labels != IGNORED, int(self.count))

    def selects(self, labels: Tensor) -> bool:
        """Whether these labels, of rows that TRL selected, are those of ours. A wait for the device."""
        return torch.equal(self.labels[self.places()].to(labels.device), labels)
