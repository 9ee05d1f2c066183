"""What each engine holds on a GPU, sends, and so takes for a step: what one GPU would do with its share, by `estimate`'s rehearsal, and what the engine adds.

One GPU holds everything. DDP does too, and sums gradients. FSDP2 (`fully_shard` of every layer) holds a share of everything and gathers each layer for its
forward and once more for its backward (Zhao et al., 2023, arXiv:2304.11277). `device_map` gives each GPU some of the layers, and they run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from tunecompile.estimate.dry_run import DryRunPlanner, StaticMemory
from tunecompile.estimate.meta_nf4 import MetaLinear4bit
from tunecompile.estimate.network import Network
from tunecompile.planner.datasheets import DatasheetGauge
from tunecompile.planner.device_memory import gradient_bytes, moment_bytes
from tunecompile.planner.solver import Assignment, LayerRun, choose
from tunecompile.runtime.find_layers import find_layers

BUCKET = 25 << 20  #: bytes of gradients that DDP sends at once (torch's bucket_cap_mb)
AHEAD = 2  #: layers that FSDP2 has gathered, or is gathering, beside the one that runs


@dataclass(frozen=True)
class ShardedBytes:
    """A layer, or all that is in none. All are bytes."""

    weights: int  #: bytes of all parameters and buffers
    shardable: int  #: bytes of those that FSDP2 shards: not the scales of 4-bit weights
    gradients: int  #: bytes, of what is trained
    optimizer: int  #: bytes of AdamW's moments

    def __add__(self, other: ShardedBytes) -> ShardedBytes:
        return ShardedBytes(
            self.weights + other.weights,
            self.shardable + other.shardable,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
        )


@dataclass(frozen=True)
class ModelBytes:
    """Of one model."""

    layers: tuple[ShardedBytes, ...]
    embedding: ShardedBytes  #: the table that token ids are looked up in, where the head does not share it
    rest: ShardedBytes  #: what is neither: last norm and head

    @property
    def root(self) -> ShardedBytes:
        return self.embedding + self.rest

    @property
    def all(self) -> ShardedBytes:
        return sum(self.layers, self.root)

    @property
    def largest(self) -> ShardedBytes:
        return max(self.layers, key=lambda layer: layer.weights)


@dataclass(frozen=True)
class EngineCost:
    """What an engine adds to the time of one GPU's work."""

    sent: float = 0.0  #: milliseconds in which GPUs send or wait for each other
    exposed: float = 0.0  #: milliseconds of these that no computation hides
    copied: float = 0.0  #: milliseconds in which gathered layers, and gradients to be sent, are laid out


def parts_of(model: nn.Module) -> ModelBytes:
    """By layer of the longest list of them."""
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


def _part(modules: Sequence[nn.Module], without: set[int] = frozenset()) -> ShardedBytes:
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
    """One GPU."""
    return StaticMemory(parts.all.weights, parts.all.gradients, parts.all.optimizer, sheet, growing=1.0)


def replicated(parts: ModelBytes, sheet: DatasheetGauge) -> StaticMemory:
    """DDP: gradients lie in its buckets as well, which are there before."""
    return StaticMemory(parts.all.weights, 2 * parts.all.gradients, parts.all.optimizer, sheet, growing=1.0)


def gathered(parts: ModelBytes) -> int:
    """Bytes that FSDP2 has gathered at the peak: the layer that runs and those ahead, and what is in no layer, which stays from forward to backward."""
    return min(len(parts.layers), 1 + AHEAD) * parts.largest.shardable + parts.root.shardable


def sharded(parts: ModelBytes, gpus: int, sheet: DatasheetGauge) -> StaticMemory:
    """FSDP2: gradients of two layers are whole, one that is made and one that is sent."""
    all_ = parts.all
    held = -(-all_.shardable // gpus) + all_.weights - all_.shardable
    gradients = -(-all_.gradients // gpus) + 2 * parts.largest.gradients + parts.root.gradients
    return StaticMemory(
        held + gathered(parts), gradients, -(-all_.optimizer // gpus), sheet, sharded=True, growing=1 / gpus
    )


def ddp_cost(parts: ModelBytes, network: Network, backward: float) -> EngineCost:
    """Gradients are summed while others are computed; the last bucket's are not. backward: milliseconds of all layers'."""
    total = parts.all.gradients
    buckets = -(-total // BUCKET)
    sent, last = network.reduce(total, buckets), network.reduce(min(total, BUCKET))
    return EngineCost(sent, last + max(0.0, sent - last - backward))


def fsdp_cost(parts: ModelBytes, network: Network, forward: float, backward: float, bandwidth: float) -> EngineCost:
    """Layers are gathered while others run, but the first; each gradient is scattered while others are computed, but the last.

    forward, backward: milliseconds of all layers'; bandwidth: bytes a millisecond of the GPU's memory.
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
    copied = (
        2 * (2 * layers + parts.root.shardable + parts.all.gradients) / bandwidth
    )  # from where it arrives to where it is read, and from where it is made to where it is sent
    return EngineCost(
        root + one + ahead + one + ahead + scatter + network.gather(parts.root.gradients), exposed, copied
    )


@dataclass(frozen=True)
class PipelineStage:
    """`device_map`: what one GPU holds, in bytes, and what its layers do."""

    weights: int  #: bytes
    gradients: int  #: bytes
    optimizer: int  #: bytes
    choice: Assignment

    @property
    def activations(self) -> int:
        """Bytes."""
        return self.choice.peak

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def stages(
    parts: ModelBytes, gpus: int, rehearsal: DryRunPlanner, allowed: int, batch: float = 1.0
) -> list[PipelineStage]:
    """Layers in equal shares, the embedding table on the first GPU, head and loss on the last. Each has the same budget, and host memory in equal shares.

    allowed: bytes on each GPU. batch: times the rows of the rehearsal.
    """
    tokens, host, ends, found = (
        int(batch * rehearsal.tokens),
        rehearsal.host_bytes(),
        [len(parts.layers) * gpu // gpus for gpu in range(gpus + 1)],
        [],
    )
    for gpu, (begin, end) in enumerate(zip(ends, ends[1:])):
        last = gpu == gpus - 1
        own = sum(
            [*parts.layers[begin + 1 : end], *([] if gpu else [parts.embedding]), *([parts.rest] if last else [])],
            parts.layers[begin],
        )
        room = allowed - own.weights - own.gradients - own.optimizer
        choice = choose(
            [LayerRun(end - begin, rehearsal.options_for(tokens))],
            room,
            rehearsal.tail(tokens) if last else 0,
            None if host is None else host // gpus,
        )
        found.append(PipelineStage(own.weights, own.gradients, own.optimizer, choice))
    return found
