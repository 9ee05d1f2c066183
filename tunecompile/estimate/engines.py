"""Memory, communication and time of each engine: the dry run of one GPU's share, plus what the engine adds.

One GPU holds everything. DDP also does, and sums gradients. FSDP2 (`fully_shard` of every layer) holds a shard of
everything and gathers each layer for its forward and again for its backward (Zhao et al., 2023, arXiv:2304.11277).
`device_map` gives each GPU some of the layers, and the GPUs run one after the other.

Collectives are rings, limited by the slowest link. In a ring of N GPUs each sends (N - 1) / N of all bytes for an
all-gather or a reduce-scatter, and twice as much for an all-reduce, in N - 1 hops each (Patarasuk and Yuan, 2009). NCCL
makes as many rings as a machine has network cards; they share the bytes, so between machines the cards of one machine
add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from tunecompile.estimate.dry_run_planner import DryRunPlanner, StaticMemory
from tunecompile.estimate.meta_model import MetaLinear4bit
from tunecompile.planner.datasheets import RING, DatasheetGauge, GpuSpec
from tunecompile.planner.device_memory import gradient_bytes, moment_bytes
from tunecompile.planner.solver import Assignment, LayerRun, choose
from tunecompile.runtime.layers.find_layers import find_layers

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


BUCKET = 25 << 20  #: bytes of gradients that DDP sends at once (torch's bucket_cap_mb)
AHEAD = 2  #: number of layers that FSDP2 has gathered, or is gathering, besides the one that runs


@dataclass(frozen=True)
class ShardedBytes:
    """Bytes of a layer, or of the part of a model outside of layers."""

    weights: int  #: all parameters and buffers
    shardable: int  #: those of them that FSDP2 shards: not the scales of 4-bit weights
    gradients: int  #: of trained parameters
    optimizer: int  #: AdamW's moments

    def __add__(self, other: ShardedBytes) -> ShardedBytes:
        return ShardedBytes(
            self.weights + other.weights,
            self.shardable + other.shardable,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
        )


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of one model, by part."""

    layers: tuple[ShardedBytes, ...]
    embedding: ShardedBytes  #: the embedding table, unless the head shares it
    rest: ShardedBytes  #: the rest: last norm and head

    @property
    def root(self) -> ShardedBytes:
        """What is in no layer."""
        return self.embedding + self.rest

    @property
    def all(self) -> ShardedBytes:
        """The whole model."""
        return sum(self.layers, self.root)

    @property
    def largest(self) -> ShardedBytes:
        """The layer with the most weights."""
        return max(self.layers, key=lambda layer: layer.weights)


@dataclass(frozen=True)
class EngineCost:
    """Milliseconds that an engine adds to the work of one GPU."""

    sent: float = 0.0  #: communication
    exposed: float = 0.0  #: the part of it that computation does not hide
    copied: float = 0.0  #: copies of gathered layers, and of gradients to be sent, into their buffers


def parts_of(model: nn.Module) -> ModelBytes:
    """The bytes of a model, by layer of its longest list of layers."""
    stack = max(find_layers(model), key=lambda found: len(found.members), default=None)
    layers = [_part([layer]) for layer in stack.members] if stack is not None else []
    inside = {
        id(t) for layer in (stack.members if stack is not None else ()) for t in (*layer.parameters(), *layer.buffers())
    }
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    alone = [] if table is None or (head is not None and head.weight is table.weight) else [table]
    return ModelBytes(
        tuple(layers), _part(alone), _part([model], inside | {id(t) for module in alone for t in module.parameters()})
    )


def _part(modules: Sequence[nn.Module], without: AbstractSet[int] = frozenset()) -> ShardedBytes:
    tensors = {
        id(t): t for module in modules for t in (*module.parameters(), *module.buffers()) if id(t) not in without
    }
    scales = {
        id(t)
        for module in modules
        for m in module.modules()
        if isinstance(m, MetaLinear4bit)
        for t in (m.absmax, m.code, m.scale, m.offset)
    }
    floats = {id(p) for module in modules for p in module.parameters()}
    trained: list[Tensor] = [t for t in tensors.values() if t.requires_grad]
    return ShardedBytes(
        sum(t.nbytes for t in tensors.values()),
        sum(t.nbytes for key, t in tensors.items() if key in floats and key not in scales),
        gradient_bytes(trained),
        moment_bytes(trained),
    )


def whole(parts: ModelBytes, sheet: DatasheetGauge) -> StaticMemory:
    """Static memory on one GPU."""
    return StaticMemory(parts.all.weights, parts.all.gradients, parts.all.optimizer, sheet, growing=1.0)


def replicated(parts: ModelBytes, sheet: DatasheetGauge) -> StaticMemory:
    """Static memory under DDP, with gradients and the buckets, which are allocated first, beside them."""
    return StaticMemory(parts.all.weights, 2 * parts.all.gradients, parts.all.optimizer, sheet, growing=1.0)


def gathered(parts: ModelBytes) -> int:
    """Bytes that FSDP2 has gathered at the peak.

    The layer that runs, the layers ahead, and what is in no layer, which stays gathered from forward to backward.
    """
    return min(len(parts.layers), 1 + AHEAD) * parts.largest.shardable + parts.root.shardable


def sharded(parts: ModelBytes, gpus: int, sheet: DatasheetGauge) -> StaticMemory:
    """Static memory under FSDP2. Gradients of two layers are unsharded: one is computed, and one is sent."""
    all_ = parts.all
    held = -(-all_.shardable // gpus) + all_.weights - all_.shardable
    gradients = -(-all_.gradients // gpus) + 2 * parts.largest.gradients + parts.root.gradients
    return StaticMemory(
        held + gathered(parts), gradients, -(-all_.optimizer // gpus), sheet, sharded=True, growing=1 / gpus
    )


def ddp_cost(parts: ModelBytes, network: Network, backward: float) -> EngineCost:
    """DDP's cost: buckets of gradients are summed while others are computed, except for the last one.

    backward: milliseconds of the backward passes of all layers.
    """
    total = parts.all.gradients
    buckets = -(-total // BUCKET)
    sent, last = network.reduce(total, buckets), network.reduce(min(total, BUCKET))
    return EngineCost(sent, last + max(0.0, sent - last - backward))


def fsdp_cost(parts: ModelBytes, network: Network, forward: float, backward: float, bandwidth: float) -> EngineCost:
    """FSDP2's cost: layers are gathered, and gradients scattered, while others are computed.

    Nothing hides the first gather and the last scatter.

    Args:
        parts: bytes of the model.
        network: the links.
        forward: milliseconds of all layers' forwards.
        backward: milliseconds of all layers' backwards.
        bandwidth: bytes a millisecond of the GPU's memory.
    """
    layers, first, count = sum(part.shardable for part in parts.layers), parts.layers[0], len(parts.layers)
    root, one = network.gather(parts.root.shardable), network.gather(first.shardable)
    ahead = network.gather(layers, count) - one
    scatter, last = (
        network.gather(sum(part.gradients for part in parts.layers), count),
        network.gather(first.gradients) + network.gather(parts.root.gradients),
    )
    back = ahead + scatter
    exposed = root + one + max(0.0, ahead - forward) + max(0.0, back - backward) + last
    # each byte is read and written once: gathered weights from the receive buffer, gradients into the send buffer
    copied = 2 * (2 * layers + parts.root.shardable + parts.all.gradients) / bandwidth
    return EngineCost(
        root + one + ahead + one + ahead + scatter + network.gather(parts.root.gradients), exposed, copied
    )


@dataclass(frozen=True)
class PipelineStage:
    """What one GPU of a `device_map` holds, in bytes, and the plan of its layers."""

    weights: int  #: bytes
    gradients: int  #: bytes
    optimizer: int  #: bytes
    choice: Assignment

    @property
    def activations(self) -> int:
        """Bytes at the peak beyond weights, gradients and optimizer."""
        return self.choice.peak

    @property
    def peak(self) -> int:
        """The sum of all bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations


def stages(
    parts: ModelBytes, gpus: int, dry_run: DryRunPlanner, allowed: int, batch: float = 1.0
) -> list[PipelineStage]:
    """The stages of a `device_map`: layers in equal shares, embedding on the first GPU, head and loss on the last.

    All GPUs have the same budget, and equal shares of host memory.

    Args:
        parts: bytes of the model.
        gpus: number of stages.
        dry_run: of the whole model on one GPU.
        allowed: bytes on each GPU.
        batch: rows, as a multiple of the rows of the dry run.
    """
    tokens, host = int(batch * dry_run.tokens), dry_run.host_bytes()
    ends = [len(parts.layers) * gpu // gpus for gpu in range(gpus + 1)]
    found = []
    for gpu, (begin, end) in enumerate(pairwise(ends)):
        last = gpu == gpus - 1
        own = sum(
            [*parts.layers[begin + 1 : end], *([] if gpu else [parts.embedding]), *([parts.rest] if last else [])],
            parts.layers[begin],
        )
        room = allowed - own.weights - own.gradients - own.optimizer
        choice = choose(
            [LayerRun(end - begin, dry_run.options_for(tokens))],
            room,
            dry_run.tail(tokens) if last else 0,
            None if host is None else host // gpus,
        )
        found.append(PipelineStage(own.weights, own.gradients, own.optimizer, choice))
    return found
