"""Time of collectives between GPUs: ring algorithms, limited by the slowest link.

In a ring of N GPUs each sends (N - 1) / N of all bytes for an all-gather or a reduce-scatter, and twice as much for an
all-reduce, in N - 1 hops each (Patarasuk and Yuan, 2009). NCCL makes as many rings as a machine has network cards; they
share the bytes, so between machines the cards of one machine add up.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunecompile.planner.datasheets import RING, GpuSpec

LAUNCH = 0.01  #: milliseconds from the call of a collective until it runs
HOP = 0.002  #: milliseconds a hop within a machine
FAR = 0.01  #: milliseconds a hop between machines


@dataclass(frozen=True)
class Network:
    """The links between GPUs."""

    gpu: GpuSpec
    gpus: int  #: number of all GPUs
    per_node: int  #: number of GPUs in one machine
    network: float  #: bandwidth between machines for each GPU, in one direction: 1e9 bytes a second

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return -(-self.gpus // self.per_node)

    @property
    def bandwidth(self) -> float:
        """Bandwidth of the slowest link, in bytes a millisecond."""
        return self.gpu.link if self.nodes == 1 else min(self.gpu.link, RING * self.network * self.per_node * 1e6)

    def gather(self, nbytes: int, calls: int = 1) -> float:
        """Milliseconds of an all-gather, or a reduce-scatter, of `nbytes` in all, in `calls` calls."""
        if self.gpus == 1 or not nbytes:
            return 0.0
        hops = min(self.gpus, self.per_node) * HOP + (self.nodes > 1) * self.nodes * FAR
        return (self.gpus - 1) / self.gpus * nbytes / self.bandwidth + calls * (LAUNCH + hops)

    def reduce(self, nbytes: int, calls: int = 1) -> float:
        """Milliseconds of an all-reduce, which is a reduce-scatter and an all-gather."""
        return 2 * self.gather(nbytes, calls)

    def send(self, nbytes: int) -> float:
        """Milliseconds of a copy from one GPU to the next in a machine."""
        return LAUNCH + nbytes / self.gpu.link
