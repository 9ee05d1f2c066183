"""Expert parallelism of transformers: each rank has some of a mixture's experts."""

from __future__ import annotations

import dataclasses
import tempfile

import torch.distributed as dist

import tunecompile
from tests.integrations.distributed.common import alike, batch, gradients, optimized, part
from tests.integrations.distributed.ranks import slow
from tests.support import zoo
from tests.support.notes import BROKEN, find, has


def _spread(one, **config):
    """The same weights, as transformers loads them under its own plan; None where it has no such plan."""
    import transformers
    from transformers.distributed import DistributedConfig

    if "ep_size" not in {field.name for field in dataclasses.fields(DistributedConfig)}:
        return None
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        one.save_pretrained(folder[0])
    dist.barrier()
    config = DistributedConfig(ep_size=dist.get_world_size(), **config)
    return transformers.AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=config).train()


@slow
def masked_rows(rank, ranks):
    """Ranks share a batch, and each leaves out the rows of the others' experts: a graph a layer."""
    one = zoo.make("qwen3_moe", num_hidden_layers=2)
    if (spread := _spread(one, tp_size=ranks, ep_implementation="all_reduce")) is None:
        return
    made = optimized(spread)
    for seed in range(2):
        for each in (made, one):
            each.zero_grad()
            each(**batch(seed)).loss.backward()
        alike(made, one)
    report = tunecompile.report(made)
    assert {m.family: m.rewritten for m in report.matches}["experts"] == 2 and not find(report, *BROKEN), report


@slow
def rows_sent_to_their_experts(rank, ranks):
    """How many rows a rank gets is another number in each step: code is generated for any."""
    one = zoo.make("qwen3_moe", num_hidden_layers=2)
    if (spread := _spread(one, fsdp_size=ranks)) is None:
        return
    made, compiles = optimized(spread), []
    for seed in range(4):
        for each, inputs in ((made, part(batch(seed), rank, ranks)), (one, batch(seed))):
            each.zero_grad()
            each(**inputs).loss.backward()
        alike(made, one)
        compiles.append(tunecompile.report(made).compiles)
    report = tunecompile.report(made)
    assert compiles[1:] == compiles[1:2] * 3 and has(report, "graph-break"), (compiles, report)
    assert {m.family: m.rewritten for m in report.matches}["experts"] == 2, report


@slow
def adapters_beside_experts(rank, ranks):
    from peft import LoraConfig, get_peft_model

    one = zoo.make("qwen3_moe", num_hidden_layers=2)
    if (spread := _spread(one, fsdp_size=ranks)) is None:
        return
    settings = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights="orthogonal")
    made, plain = (get_peft_model(each, settings).train() for each in (spread, _spread(one, fsdp_size=ranks)))
    plain.load_state_dict(made.state_dict())
    optimized(made)
    for seed in range(2):
        for each in (made, plain):
            each.zero_grad()
            each(**part(batch(seed), rank, ranks)).loss.backward()
        assert max(zoo.errors(gradients(made), gradients(plain)).values()) < 1e-4
    assert {m.family: m.rewritten for m in tunecompile.report(made).matches}["experts"] == 2
