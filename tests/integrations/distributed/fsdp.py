"""FSDP2: `fully_shard` of every layer, which is one compiled region, and of what is around them."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import tunecompile
from tests.integrations.distributed.common import (
    DEVICE,
    alike,
    batch,
    model,
    of_docs,
    optimized,
    packed,
    part,
    resumed,
    steps,
    unrecorded,
    whole,
)
from tests.integrations.distributed.ranks import slow
from tests.support import zoo
from tests.support.memory.full_device import FULL, WHERE, Full
from tests.support.models.packed import OVER
from tests.support.notes import codes, find, has
from tunecompile.errors import CannotVerify
from tunecompile.planner import candidates
from tunecompile.planner.solver import KEEP, RECOMPUTE
from tunecompile.runtime.loss_head import losses
from tunecompile.runtime.loss_head.logits import Logits


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
def one_rank_pads_or_packs(rank, ranks):
    """The second layer computes over tokens. A batch that is begun again there would gather the first one's weights
    again, alone; a layer that is called again sends its gradients in its turn."""

    def build():
        made = zoo.make("llama", num_hidden_layers=3, use_cache=False).to(DEVICE).train()
        made.model.layers[1].mlp = torch.nn.Sequential(made.model.layers[1].mlp, torch.nn.Softmax(1))
        return made

    ours, eager = _sharded(optimized(build())), _sharded(build())
    for packs in (False, True):
        inputs = part(batch(rows=2 * ranks), rank, ranks)
        if packs:
            length = 10 if rank == 0 else 24
            inputs["position_ids"] = (torch.arange(24, device=DEVICE) % length).repeat(2, 1)
        else:
            mask = inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            mask[1, 24 if rank else 18 :] = 0
            inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
        for each in (ours, eager):
            each.zero_grad()
            each(**inputs).loss.backward()
        alike(ours, eager)
    for code, reason in (("padding-kept", "weights-gathered"), ("packing-kept", "mixes-tokens")):
        assert has(ours, code, reason=reason) == (rank == 0), tunecompile.report(ours)


def _mixture(bits: int = 32):
    """A token goes to every expert."""
    sizes = {"num_hidden_layers": 2, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    made = zoo.adapt(zoo.make("qwen3_moe", **sizes), target_modules=["q_proj"], target_parameters=OVER).to(DEVICE)
    if bits == 4:
        tunecompile.quantize_experts(made)
    return made.train()


@slow
def adapters_over_experts_sharded_before(rank, ranks):
    made = optimized(_sharded(_mixture()))
    steps(made, _mixture(), rank, ranks)
    whole(made)
    assert {m.family: m.rewritten for m in tunecompile.report(made).matches}["experts"] == 2


@slow
def experts_in_4_bits_sharded_before(rank, ranks):
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        return  # FSDP2 shards floats alone
    made = optimized(_sharded(_mixture(bits=4)))
    steps(made, optimized(_mixture(bits=4)), rank, ranks)
    whole(made)


@slow
def as_the_readme_says(rank, ranks):
    steps(of_docs("fully_shard(", {"model": model(), "fully_shard": fully_shard}), model(), rank, ranks)


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
def offloaded(rank, ranks):
    """Shards wait on the host. (Where there is no GPU, that is where they are.)"""
    for make in (model, lambda: model(full=True)):
        torch._dynamo.reset()
        made, plain = (
            _sharded(each, offload_policy=CPUOffloadPolicy(pin_memory=DEVICE == "cuda"))
            for each in (optimized(make()), make())
        )
        for each in (made, plain):
            for seed in range(2):
                each(**part(batch(seed), rank, ranks)).loss.backward()
        alike(made, plain)
        whole(made)


@slow
def checkpointed(rank, ranks):
    made, one = optimized(model(full=True)), model(full=True)
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    steps(_sharded(made), one, rank, ranks)


def _head_kept(made, **options):
    """As accelerate does: head and norm are one unit, whose weights stay from the forward to the backward."""
    base = made.get_base_model() if hasattr(made, "get_base_model") else made
    fully_shard(base.model.embed_tokens, **options)
    fully_shard([base.model.norm, base.lm_head], reshard_after_forward=False, **options)
    return _sharded(made, **options)


def _refused(made):
    """Why the head's logits are made."""
    tally = next(m for m in tunecompile.report(made).matches if m.family == "linear_cross_entropy")
    return [] if tally.rewritten else codes(tally.refused[:1])


def _no_logits(self):
    raise AssertionError("logits are made")


def a_head_that_stays_gathered(rank, ranks):
    """FSDP2 asks all that a model returns for a hook, and no logits are made for it."""
    made = _head_kept(optimized(model(full=True)))
    with patch.object(Logits, "materialize", _no_logits):
        steps(made, model(full=True), rank, ranks)
    whole(made)
    assert not _refused(made)


@slow
def a_head_in_the_outermost_unit(rank, ranks):
    for make in (model, lambda: model(full=True)):
        torch._dynamo.reset()
        made = _sharded(optimized(make()))
        with patch.object(Logits, "materialize", _no_logits):
            steps(made, make(), rank, ranks)
        assert not _refused(made)


@slow
def flat_weights(rank, ranks):
    """FSDP1 frees them, and has its hooks on logits, when the model's forward ends."""
    for first in (True, False):
        for original in (True, False):
            torch._dynamo.reset()
            made, one = model(full=True), model(full=True)
            made = optimized(made) if first else made
            wrapped = FullyShardedDataParallel(
                made,
                auto_wrap_policy=partial(
                    transformer_auto_wrap_policy, transformer_layer_cls={type(made.model.layers[0])}
                ),
                use_orig_params=original,
                device_id=torch.device(DEVICE, rank) if DEVICE == "cuda" else torch.device("cpu"),
            )
            made = made if first else optimized(wrapped)
            for each, inputs in ((one, batch()), (wrapped, part(batch(), rank, ranks))):
                optimizer = torch.optim.SGD(each.parameters(), lr=1.0)
                each(**inputs).loss.backward()
                optimizer.step()
            with FullyShardedDataParallel.summon_full_params(wrapped):
                found = {
                    name.replace("_fsdp_wrapped_module.", ""): p.detach() for name, p in wrapped.named_parameters()
                }
                start = dict(model(full=True).named_parameters())
                worst = zoo.errors(
                    *(
                        {name: weights[name] - start[name].detach() for name in start}
                        for weights in (found, {name: p.detach() for name, p in one.named_parameters()})
                    )
                )
                assert max(worst.values()) < 1e-3, max(worst.items(), key=lambda item: item[1])
            assert "head-in-fsdp1" in _refused(made) and not find(made, "new-layers")


@slow
def a_head_that_stays_gathered_under_adapters(rank, ranks):
    """Its logits are read in evaluation."""
    made, one = _head_kept(optimized(model())), model()
    for _ in range(2):
        steps(made, one, rank, ranks)
        made.eval(), one.eval()
        with torch.no_grad():
            torch.testing.assert_close(made(**batch(9)).logits, one(**batch(9)).logits, atol=1e-3, rtol=1e-3)
        made.train(), one.train()
    assert not _refused(made)


@slow
def a_head_that_stays_gathered_in_other_loops(rank, ranks):
    """Gradients accumulate, logits are read beside the loss, or the loss is the loop's own."""
    made, one = _head_kept(optimized(model(full=True))), model(full=True)
    for seed in range(3):
        one(**batch(seed)).loss.backward()
        made.set_requires_gradient_sync(seed == 2)
        made(**part(batch(seed), rank, ranks)).loss.backward()
    alike(made, one)

    def beside(each, inputs):
        output = each(**inputs)
        return output.loss + 1e-2 * output.logits.float().square().mean()

    def own(each, inputs):
        return torch.nn.functional.cross_entropy(
            each(inputs["input_ids"]).logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        )

    for loss in (beside, own):
        for seed in range(2):
            made.zero_grad(), one.zero_grad()
            loss(one, batch(seed)).backward()
            loss(made, part(batch(seed), rank, ranks)).backward()
            alike(made, one)


@slow
def a_head_that_stays_gathered_in_mixed_precision(rank, ranks):
    """Its loss is no less exact, whatever dtype logits are returned in."""
    for dtype, said in ((None, ""), (torch.bfloat16, ""), (torch.float32, "logits-in-other-dtype")):
        torch._dynamo.reset()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=dtype)
        made, plain = (_head_kept(each, mp_policy=policy) for each in (optimized(model(full=True)), model(full=True)))
        losses = [each(**part(batch(), rank, ranks)).loss for each in (made, plain)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, rtol=1e-4 if dtype is not torch.bfloat16 else 1e-2, atol=0)
        alike(made, plain, limit=0.05)
        assert (said in _refused(made)) == bool(said) == bool(_refused(made))


@slow
def a_head_that_is_gathered_again(rank, ranks):
    """For the backward pass, if for the loss: one rank may read logits by itself."""
    made = optimized(model(full=True))
    fully_shard(made.lm_head)
    steps(_sharded(made), model(full=True), rank, ranks)
    assert "head-resharded" in _refused(made)


@slow
def out_of_memory_in_the_loss(rank, ranks):
    """Repeated between the head's hooks, which every rank calls once."""
    made = optimized(model(full=True), memory="1GiB")
    ours, one, real, left = _head_kept(made), model(full=True), losses.linear_cross_entropy, [rank]

    def full(*args):
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError(FULL)
        return real(*args)

    steps(ours, one, rank, ranks, count=1)
    with patch.object(losses, "linear_cross_entropy", full):
        steps(ours, one, rank, ranks)
    assert left == [0] and not _refused(made)


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
            faults = (
                [Full(made, 1, WHERE[seed])] if rank == seed else []
            )  # the other layer gives up its graph: there is no smaller plan
            for each in (ours, plain):
                each.zero_grad()
                with patch.object(
                    candidates, "candidate_stages", lambda graph: iter([[KEEP], [RECOMPUTE]])
                ):  # to survey a whole layer takes its time
                    each(**part(batch(seed), rank, ranks)).loss.backward()
            alike(ours, plain, limit)
            assert all(fault.raised == 1 for fault in faults)
        assert not made._tunecompile.step.recovery.refused


@slow
def verification_is_refused(rank, ranks):
    made = _sharded(optimized(model(), verify=True))
    steps(made, model(), rank, ranks, count=1)
    assert has(made, "not-verified", detail="Verify on one process, before they are")
    with pytest.raises(CannotVerify, match="its weights are shared with other processes"):
        tunecompile.verify(made, part(batch(), rank, ranks))


@slow
def interrupted_and_resumed(rank, ranks):
    resumed(lambda made: _sharded(optimized(made)), rank, ranks)
