"""Memory budgets of several ranks: each plans for itself, and what one finds out all follow."""

from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import tunecompile
from tests.integrations.distributed.common import DEVICE, alike
from tests.integrations.distributed.ranks import slow
from tests.support.memory.budgets import LAYERS
from tests.support.memory.full_device import WHERE, Full, build, graphs, loss, needed
from tests.support.notes import find, has
from tunecompile.errors import RankLost
from tunecompile.planner.device_memory import HostGauge, part_bytes
from tunecompile.runtime.memory.accounting import MemoryAccounting


def _sharded(made):
    for layer in made.backbone.layers:
        fully_shard(layer)
    return fully_shard(made)


def _plans(made):
    return [(plan["layers"], bool(plan["recompute"])) for plan in tunecompile.report(made).memory["plans"]]


def _train(wrapped, *batches):
    """Gradients stay."""
    for seed, rows in enumerate(batches):
        wrapped.zero_grad()
        torch.manual_seed(seed)
        loss(wrapped, rows, seed).backward()


def _each_for_its_own_batch(wrap, rank):
    """Plans of different ranks go together."""
    memory, rows = int(1.2 * needed()), 4 + 12 * rank
    made = build(memory)
    ours, one = wrap(made), wrap(build(None))
    for each in (ours, one):
        _train(each, rows, rows)
    alike(ours, one)
    # the last of four keeps: its backward comes next, and takes more memory where it recomputes than its results do
    plans = ([(4, False)], [(3, True), (1, False)])
    assert _plans(made) == plans[rank]
    layers, recompute = plans[1 - rank][0]
    theirs = f"rank {1 - rank} follows another plan ({layers} layers {'recompute' if recompute else 'keep'}"
    assert has(made, "rank-plans", subject=str(rank), ranks=2, reason="other-plans", detail=theirs)


@slow
def gathered_layers_for_each_batch(rank, ranks):
    _each_for_its_own_batch(_sharded, rank)


@slow
def whole_layers_for_each_batch(rank, ranks):
    _each_for_its_own_batch(DistributedDataParallel, rank)


def _finds_out(where, rank):
    made = build(int(1.2 * needed()))
    ours, one = DistributedDataParallel(made), DistributedDataParallel(build(None))
    _train(ours, 4)
    if rank == 1:
        full = Full(made, 1, where)
    for each in (ours, one):
        _train(each, 4)
    alike(ours, one)
    assert _plans(made) == ([(4, False)] if rank == 0 else [(1, True), (3, False)]) and (rank == 0 or full.raised == 1)
    for each in (ours, one):
        _train(each, 4)
    alike(ours, one)
    assert _plans(made) == [(1, True), (3, False)] and has(
        made, "rank-plans", subject=str(rank), ranks=2, reason="same-plan"
    )
    who, before = ("rank 1", "4 layers keep") if rank == 0 else ("the step", "")
    assert len(find(made, "ran-out-of-memory", subject=who, before=before)) == 1


def what_one_finds_out(rank, ranks):
    """Memory runs out on one rank: it repeats that part, nobody else does, and all have the same plan from their next step on."""
    _finds_out(WHERE[1], rank)


@slow
def what_one_finds_out_elsewhere_in_the_step(rank, ranks):
    for where in (WHERE[0], WHERE[2]):
        _finds_out(where, rank)


@slow
def a_small_batch_has_room(rank, ranks):
    """What the other rank has left is enough for this one: its plan stays."""
    made = build(int(1.2 * needed()))
    ours = DistributedDataParallel(made)
    _train(ours, 4 - 2 * rank)
    if rank == 0:
        Full(made, 1, "forward")
    for _ in range(2):
        _train(ours, 4 - 2 * rank)
    assert _plans(made) == ([(1, True), (3, False)] if rank == 0 else [(4, False)]) and not (
        rank and find(made, "ran-out-of-memory", "smallest-plan-ran-out")
    )


@slow
def what_one_of_gathered_layers_finds_out(rank, ranks):
    """A layer that is whole is repeated on one rank, in forward and backward, while the other waits in what it sends next."""
    made = build(int(1.2 * needed()))
    ours, one = _sharded(made), _sharded(build(None))
    _train(ours, 4)
    faults = (
        [Full(made, *fault) for fault in ((3, "forward"), (2, "behind the backward"), (0, "before the backward", 2))]
        if rank == 1
        else []
    )
    for _ in range(2):
        for each in (ours, one):
            _train(each, 4)
        alike(ours, one)
        assert [fault.raised for fault in faults] == [1, 1, 2][: len(faults)] and not graphs(made)
    assert _plans(made) != [(4, False)] and has(made, "rank-plans", subject=str(rank), ranks=2, reason="same-plan")
    assert has(made, "ran-out-of-memory", subject="the step" if rank else "rank 1", before="4 layers keep")


@slow
def what_one_of_gathered_layers_finds_out_at_first(rank, ranks):
    """In the very first step, without a budget that would do, and while gradients accumulate."""
    made = build(int(1.2 * needed()))
    ours, one = _sharded(made), _sharded(build(None))
    faults = [Full(made, 1, where) for where in WHERE] if rank == 0 else []
    for sent in (False, True):
        for each in (ours, one):
            each.set_requires_gradient_sync(sent)
            torch.manual_seed(5)
            loss(each).backward()
    alike(ours, one)
    assert all(fault.raised == 1 for fault in faults)


def a_rank_that_cannot_repeat(rank, ranks):
    """What is between layers is gathered from all ranks, which are in the middle of the step. The error is none that a loop would leave a step out for, and neither
    is that of a layer that no plan has room for."""
    made = _sharded(build(int(1.2 * needed())))
    _train(made, 4)
    recovery = made._tunecompile.step.recovery
    lost = f"Rank {rank} of 2 ran out of memory.*resume it from its last checkpoint with memory='0.*MiB'"
    with pytest.raises(RankLost, match=lost) as caught:
        recovery.make_room(2048, 1, made._tunecompile.step.budget, restarts=True)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    Full(made, 1, "forward", times=10)
    with pytest.raises(RankLost, match=lost):
        _train(made, 4)


def a_board_that_is_gone(rank, ranks):
    """The store may be that of a rank that has ended."""

    class Gone:
        def check(self, keys):
            raise torch.distributed.DistNetworkError("connection was reset")

    made = build(int(1.2 * needed()))
    _train(made, 4)
    board = made._tunecompile.store
    board.store = Gone()
    _train(made, 4)
    assert board.store is None and has(made, "rank-plans", subject=str(rank), ranks=2, reason="no-other-plan")


def gradients_of_shards(rank, ranks):
    """On a device whose bytes all count, each rank counts its own shards' gradients and moments, and whole what is gathered: a layer, those beside the layers
    with their gradients, and the gradients of one layer that are being sent."""
    for sent in (True, False):
        torch._dynamo.reset()
        made = _sharded(build("1GiB"))
        made.set_requires_gradient_sync(sent)
        layer, beside = (
            made.backbone.layers[1],
            [*made.head.parameters(), *made.backbone.embed.parameters(), *made.backbone.norm.parameters()],
        )
        part, whole, root, shards = (
            _bytes(layer.parameters()),
            _whole(layer.parameters()),
            _whole(beside),
            _bytes(made.parameters()),
        )
        with (
            patch.object(MemoryAccounting, "bounds_all", True),
            patch.object(HostGauge, "allocated", lambda _: _bytes(made.parameters())),
        ):
            _train(made, 4)
        budget = made._tunecompile.step.budget
        assert 2 * part == whole and budget.memory.present == LAYERS * part + (whole - part) + root
        assert {option.gradients for options in budget.admitted.choice.options for option in options} == {
            part if sent else whole
        }
        assert budget.admitted.resident == budget.memory.present + root + 2 * shards + whole
        assert not find(made, "compiled-without-rewrites")


def _bytes(parameters):
    return sum(map(part_bytes, parameters))


def _whole(parameters):
    return sum(p.numel() * p.element_size() for p in parameters)


def parts_of_tensors(rank, ranks):
    mesh, weight = init_device_mesh(DEVICE, (ranks,)), torch.empty(8, 4, device=DEVICE)
    assert [part_bytes(distribute_tensor(weight, mesh, [placement])) for placement in (Shard(0), Replicate())] == [
        128 // ranks,
        128,
    ] and part_bytes(weight) == 128
