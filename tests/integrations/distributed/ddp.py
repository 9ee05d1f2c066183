"""DistributedDataParallel around an optimized model, or an optimized model inside."""

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

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
    whole,
)
from tests.integrations.distributed.ranks import slow
from tests.support import zoo
from tests.support.notes import find, has
from tests.support.planted_passes import planted_passes
from tunecompile import passes


def _in_one_piece(make, rank, ranks):
    made = optimized(make())
    steps(DistributedDataParallel(made), make(), rank, ranks)
    whole(made)


def adapters(rank, ranks):
    _in_one_piece(model, rank, ranks)


def the_op_of_the_first_nan(rank, ranks):
    """Each rank looks for itself: one has a batch that breaks, the other its gradients alone. Nothing is sent for it."""
    for sends in (False, True):
        made = zoo.Stack(lambda: _Divides(sends), 2).train()
        watcher = tunecompile.watch(made)
        wrapped = DistributedDataParallel(made)
        rule = torch.optim.SGD(made.parameters(), lr=0.1)
        for turn in range(2):
            broken = turn == 1 and (rank == 1 or sends)
            wrapped(torch.ones(2, 8) * (0.0 if broken else 1.0)).backward()
            rule.step()
            rule.zero_grad()
        watcher.stop()
        codes = [each.code for each in watcher.findings]
        assert ("loss-not-finite" in codes) == broken and "gradients-not-finite" in codes, codes
        assert ("made-not-finite" in codes) == (broken and not sends), codes


class _Divides(torch.nn.Module):
    """Of its input by itself; perhaps with a sum over ranks before."""

    def __init__(self, sends):
        super().__init__()
        self.linear, self.sends = torch.nn.Linear(8, 8), sends

    def forward(self, x):
        if self.sends:
            x = torch.distributed.nn.functional.all_reduce(x)
        return self.linear(x / x.detach())


@slow
def as_the_readme_says(rank, ranks):
    steps(
        of_docs("DistributedDataParallel(", {"model": model(), "DistributedDataParallel": DistributedDataParallel}),
        model(),
        rank,
        ranks,
    )


@slow
def four_bits(rank, ranks):
    _in_one_piece(packed, rank, ranks)


@slow
def wrapped_before(rank, ranks):
    made = model()
    wrapped = DistributedDataParallel(made, find_unused_parameters=True)
    optimized(made)
    steps(wrapped, model(), rank, ranks)


def all_weights_in_small_buckets(rank, ranks):
    """Dynamo would cut a layer where a bucket ends: then nothing in it is found."""
    sizes = dict(hidden_size=256, intermediate_size=1024)
    made = optimized(model(full=True, **sizes))
    steps(DistributedDataParallel(made, bucket_cap_mb=1), model(full=True, **sizes), rank, ranks)
    whole(made)
    assert {m.family: m.rewritten for m in tunecompile.report(made).matches}["swiglu"] == 1


def _sent(made, **options):
    """The wrapped model; the first layer's gradients that are there; for each bucket how many of them were, when it was sent."""
    wrapped, there, counts = DistributedDataParallel(made, **options), [], []

    def send(_, bucket):
        counts.append(len(there))
        return allreduce_hook(None, bucket)

    wrapped.register_comm_hook(None, send)
    base = made.get_base_model() if hasattr(made, "get_base_model") else made
    for parameter in filter(lambda p: p.requires_grad, base.model.layers[0].parameters()):
        parameter.register_post_accumulate_grad_hook(there.append)
    return wrapped, there, counts


@slow
def sent_while_the_backward_runs(rank, ranks):
    """Gradients of the last layers leave before those of the first one are made, and in as many buckets as without `optimize`: those of adapters in one."""
    sizes = dict(hidden_size=256, intermediate_size=1024)
    for full, cap in ((True, 1), (False, 25)):
        torch._dynamo.reset()
        found = [_sent(make(model(full=full, **sizes)), bucket_cap_mb=cap) for make in (optimized, lambda made: made)]
        for seed in range(3):  # behind the first backward DDP makes its buckets anew, in the order of gradients
            for wrapped, there, counts in found:
                wrapped.zero_grad(), there.clear(), counts.clear()
                wrapped(**part(batch(seed), rank, ranks)).loss.backward()
        (_, _, ours), (_, _, plain) = found
        assert (
            len(ours) == len(plain)
            and ours.count(0) == plain.count(0)
            and (ours.count(0) > 1 if full else len(ours) == 1)
        ), (ours, plain)


@slow
def static_graph_and_checkpoints(rank, ranks):
    made, one = optimized(model()), model()
    for each in (made, one):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    steps(DistributedDataParallel(made, static_graph=True), one, rank, ranks)


@slow
def one_rank_begins_its_batch_again(rank, ranks):
    """The second layer computes over tokens, which the rank whose batch is padded finds out; then logits are read at
    padding. Nothing is sent between ranks while layers run, and gradients go once."""

    def build(mixes):
        made = zoo.make("llama", num_hidden_layers=3, use_cache=False).to(DEVICE).train()
        if mixes:
            made.model.layers[1].mlp = torch.nn.Sequential(made.model.layers[1].mlp, torch.nn.Softmax(1))
        return made

    for mixes in (True, False):
        made = optimized(build(mixes))
        ours, eager = DistributedDataParallel(made), DistributedDataParallel(build(mixes))
        for seed in range(3):
            inputs = part(batch(seed, rows=2 * ranks), rank, ranks)
            mask = inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            mask[1, 24 if rank else 18 :] = 0
            inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
            for each in (ours, eager):
                each.zero_grad()
                output = each(**inputs)
                read = 0 if mixes or seed == 0 else output.logits.square().mean()
                (output.loss + read).backward()
            alike(ours, eager)
        reason = "mixes-tokens" if mixes else "logits-read"
        assert has(made, "padding-kept", reason=reason) == (rank == 0), tunecompile.report(made)


@slow
def accumulated_without_sync(rank, ranks):
    wrapped, one = DistributedDataParallel(optimized(model())), model()
    for seed in range(2):
        one(**batch(seed)).loss.backward()
    with wrapped.no_sync():
        wrapped(**part(batch(0), rank, ranks)).loss.backward()
    wrapped(**part(batch(1), rank, ranks)).loss.backward()
    alike(wrapped, one)


@slow
def lengths_of_their_own(rank, ranks):
    """A rank compiles for another length, while the other waits for its gradients."""
    wrapped, one = DistributedDataParallel(optimized(model())), model()
    for seed in range(3):
        wrapped.zero_grad(), one.zero_grad()
        for other in range(ranks):
            (one(**batch(seed, 2, 16 + 8 * seed * other)).loss / ranks).backward()
        wrapped(**batch(seed, 2, 16 + 8 * seed * rank)).loss.backward()
        alike(wrapped, one)


@slow
def within_a_budget(rank, ranks):
    made = optimized(model(), memory="1GiB")
    steps(DistributedDataParallel(made), model(), rank, ranks)
    assert tunecompile.report(made).memory["plans"]


@slow
def verified_on_each_rank(rank, ranks):
    """Without an exchange: what the reducer sees of it is nothing."""
    for options in ({}, {"find_unused_parameters": True}):
        made = optimized(model(), verify=True)
        steps(DistributedDataParallel(made, **options), model(), rank, ranks)
        notes = tunecompile.report(made).notes
        assert notes[0].code == "verified" and notes[0].detail.endswith("as near to float64 as eager's"), notes
        assert has(notes, "verified-on-ranks", reason="right-on-ranks", count=ranks - 1, ranks=ranks - 1)


@slow
def not_verified_in_a_static_graph(rank, ranks):
    """Its backward passes would be counted: gradients of the step after it would never be reduced."""
    made = optimized(model(), verify=True)
    steps(DistributedDataParallel(made, static_graph=True), model(), rank, ranks)
    assert has(tunecompile.report(made).notes[:1], "not-verified", detail="Verify before the model is wrapped")


@slow
def verified_as_it_is_wrapped(rank, ranks):
    wrapped = DistributedDataParallel(optimized(model()))
    if rank == 0:
        result = tunecompile.verify(wrapped, part(batch(), rank, ranks))
        assert result.passed and not any(row["parameter"].startswith("module.") for row in result.gradients)
    steps(wrapped, model(), rank, ranks)


@slow
def wrong_on_one_rank(rank, ranks):
    """It looks for the rewrite at fault by itself, while the others wait for its gradients, and all reports tell."""
    pipeline = passes.PIPELINE
    passes.PIPELINE = planted_passes(1.01) if rank == 1 else pipeline
    try:
        made = optimized(model(), verify=True)
        steps(DistributedDataParallel(made), model(), rank, ranks)
    finally:
        passes.PIPELINE = pipeline
    said = "loss is as near to the reference as eager's does not hold"
    notes = find(made, "verified", "verified-on-ranks", detail=said)
    assert len(notes) == 1 and notes[0].code == ("verified" if rank == 1 else "verified-on-ranks"), notes
    assert rank == 1 or has(notes, "verified-on-ranks", detail="rank 1: ", count=ranks - 1, ranks=ranks - 1), notes
    assert "the rewrite at fault is planted: wrong" in notes[0]


@slow
def interrupted_and_resumed(rank, ranks):
    resumed(lambda made: DistributedDataParallel(optimized(made)), rank, ranks)
