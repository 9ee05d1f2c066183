"""FSDP2: `fully_shard` of every layer, which is one compiled region, and of what is around them."""

from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tunecompile
from tests.distributed.common import alike, batch, model, of_readme, optimized, packed, part, resumed, steps, unrecorded, whole
from tests.distributed.ranks import slow
from tests.memory.full import WHERE, Full
from tunecompile.errors import CannotVerify
from tunecompile.memory import menu
from tunecompile.memory.planner import KEEP, RECOMPUTE


def _layers(of):
    return [module for module in of.modules() if type(module).__name__.endswith("DecoderLayer")]


def _sharded(made, **options):
    for layer in _layers(made):
        fully_shard(layer, **options)
    return fully_shard(made, **options)


def adapters(rank, ranks):
    made = _sharded(optimized(model()))
    steps(made, model(), rank, ranks)
    whole(made)
    unrecorded(made)
    assert {m.family: m.rewritten for m in tunecompile.report(made).matches}["lora"] == 7


@slow
def as_the_readme_says(rank, ranks):
    steps(of_readme("fully_shard(", {"model": model(), "fully_shard": fully_shard}), model(), rank, ranks)


@slow
def four_bits(rank, ranks):
    """What is gathered has lost its quantisation state."""
    made = _sharded(optimized(packed()))
    steps(made, packed(), rank, ranks)
    whole(made)
    assert {m.family: m.rewritten for m in tunecompile.report(made).matches}["nf4"] == 7
    hooks = [len(layer._forward_pre_hooks) for layer in _layers(made)]
    tunecompile.restore(made)
    assert [len(layer._forward_pre_hooks) for layer in _layers(made)] == [count - 1 for count in hooks]


@slow
def all_weights_sharded_before(rank, ranks):
    made = optimized(_sharded(model(full=True)))
    steps(made, model(full=True), rank, ranks)
    whole(made)


@slow
def trained_and_saved(rank, ranks):
    """A few steps of AdamW, and the whole state dict as without `optimize`."""
    made, plain = _sharded(optimized(model(full=True))), _sharded(model(full=True))
    states = []
    for each in (made, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-3)
        for seed in range(3):
            each(**part(batch(seed), rank, ranks)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(get_model_state_dict(each, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))
    assert list(states[0]) == list(states[1])
    assert all(torch.allclose(states[0][name], value, atol=1e-5) for name, value in states[1].items())


@slow
def accumulated_without_sync(rank, ranks):
    made, one = _sharded(optimized(model())), model()
    for seed in range(2):
        one(**batch(seed)).loss.backward()
        made.set_requires_gradient_sync(seed == 1)
        made(**part(batch(seed), rank, ranks)).loss.backward()
    alike(made, one)


@slow
def mixed_precision(rank, ranks):
    """Gathered in bf16, reduced in fp32: as far from fp32 as without `optimize`."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    made, plain = _sharded(optimized(model(full=True)), mp_policy=policy), _sharded(model(full=True), mp_policy=policy)
    for each in (made, plain):
        each(**part(batch(), rank, ranks)).loss.backward()
    alike(made, plain, limit=0.05)
    whole(made)


@slow
def checkpointed(rank, ranks):
    made, one = optimized(model(full=True)), model(full=True)
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    steps(_sharded(made), one, rank, ranks)


@slow
def within_a_budget(rank, ranks):
    made = _sharded(optimized(model(), memory="1GiB"))
    steps(made, model(), rank, ranks)
    assert tunecompile.report(made).memory["plans"]


@slow
def out_of_memory(rank, ranks):
    """Layers whose weights are gathered from 4 bits, or in another dtype, are repeated by one rank: as far from the truth as without `optimize`."""
    mixed = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for make, options, limit in ((packed, {}, 1e-4), (lambda: model(full=True), mixed, 0.05)):
        torch._dynamo.reset()
        made = optimized(make(), memory="1KiB")
        ours, plain = _sharded(made, **options), _sharded(make(), **options)
        for seed in range(2):
            faults = [Full(made, 1, WHERE[seed])] if rank == seed else []  # the other layer gives up its graph: there is no smaller plan
            for each in (ours, plain):
                each.zero_grad()
                with patch.object(menu, "courses", lambda graph: iter([[KEEP], [RECOMPUTE]])):  # to survey a whole layer takes its time
                    each(**part(batch(seed), rank, ranks)).loss.backward()
            alike(ours, plain, limit)
            assert all(fault.raised == 1 for fault in faults)
        assert not made._tunecompile.step.recovery.refused


@slow
def verification_is_refused(rank, ranks):
    made = _sharded(optimized(model(), verify=True))
    steps(made, model(), rank, ranks, count=1)
    assert any(note.startswith("not verified: ") and "Verify on one process, before they are" in note for note in tunecompile.report(made).notes)
    with pytest.raises(CannotVerify, match="its weights are shared with other processes"):
        tunecompile.verify(made, part(batch(), rank, ranks))


@slow
def interrupted_and_resumed(rank, ranks):
    resumed(lambda made: _sharded(optimized(made)), rank, ranks)
