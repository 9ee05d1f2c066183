"""How long GPUs take to gather, reduce and scatter: a ring, by the bandwidth of its slowest link.

In a ring of N every GPU passes on (N - 1) / N of all bytes to gather or to reduce-scatter them, and twice as much to reduce and gather, in N - 1 hops
each (Patarasuk and Yuan, 2009). NCCL lays as many rings as a machine has network cards, which share the bytes: between machines all cards of one count.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunecompile.planner.datasheets import RING, GpuSpec

LAUNCH = 0.01  #: milliseconds from the call of a collective until it runs
HOP = 0.002  #: milliseconds a hop within a machine
FAR = 0.01  #: milliseconds a hop between machines


@dataclass(frozen=True)
class Network:
    """What connects so many GPUs."""

    gpu: GpuSpec
    gpus: int  #: number of all
    per_node: int  #: number in one machine
    network: float  #: of the network, for each GPU and in one direction: 1e9 bytes a second

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.per_node)

    @property
    def bandwidth(self) -> float:
        """Bytes a millisecond."""
        return self.gpu.link if self.nodes == 1 else min(self.gpu.link, RING * self.network * self.per_node * 1e6)

    def gather(self, nbytes: int, calls: int = 1) -> float:
        """Milliseconds until every GPU has all of so many bytes, in so many calls; to reduce-scatter takes as long."""
        if self.gpus == 1 or not nbytes:
            return 0.0
        hops = min(self.gpus, self.per_node) * HOP + (self.nodes > 1) * self.nodes * FAR
        return (self.gpus - 1) / self.gpus * nbytes / self.bandwidth + calls * (LAUNCH + hops)

    def reduce(self, nbytes: int, calls: int = 1) -> float:
        """Milliseconds until every GPU has the sum: scattered, then gathered."""
        return 2 * self.gather(nbytes, calls)

    def send(self, nbytes: int) -> float:
        """Milliseconds from one GPU to the next in a machine."""
        return LAUNCH + nbytes / self.gpu.link
