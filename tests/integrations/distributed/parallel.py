"""Tensor, pipeline and context parallelism: ranks share one batch, and each has a part of the model or of the sequences."""

from __future__ import annotations

import contextlib
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tunecompile
from tests.integrations.distributed.common import DEVICE, alike, batch, gradients, model, of_docs, optimized, whole
from tests.integrations.distributed.ranks import slow
from tests.support import zoo
from tests.support.notes import EAGER, find, has
from tunecompile.planner import candidates
from tunecompile.planner.solver import KEEP, RECOMPUTE

# -- tensor parallelism -----------------------------------------------------------------------------------------------------


def _sharded(one):
    """The same weights, as transformers loads them under its own plan."""
    import transformers

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        one.save_pretrained(folder[0])
    dist.barrier()
    return transformers.AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto").train()


def _same(made, one, count=2):
    """Every rank has the whole batch, and the loss of all of it."""
    for seed in range(count):
        losses = []
        for each in (made, one):
            each.zero_grad()
            losses.append(each(**batch(seed)).loss)
            losses[-1].backward()
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
        alike(made, one)


def tensors(rank, ranks):
    one = model(full=True)
    made = optimized(_sharded(one))
    _same(made, one)
    whole(made)
    assert {m.family: m.rewritten for m in tunecompile.report(made).matches}["swiglu"] == 1


@slow
def adapters_beside_tensors(rank, ranks):
    """As without `optimize`: PEFT adapts what is sharded by column. (By row it fails, with peft 0.21 and transformers 5.23.)"""
    from peft import LoraConfig, get_peft_model

    one = model(full=True)
    made, plain = (
        get_peft_model(
            _sharded(one), LoraConfig(target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights="orthogonal")
        ).train()
        for _ in range(2)
    )
    plain.load_state_dict(made.state_dict())
    _same(optimized(made), plain)
    assert has(made, "sharded-linears")


@slow
def tensors_by_torchs_own_plan(rank, ranks):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, made, one = init_device_mesh(DEVICE, (ranks,)), model(full=True), model(full=True)
    for layer in made.model.layers:
        parallelize_module(
            layer,
            mesh,
            {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
            | {"self_attn.o_proj": RowwiseParallel()}
            | {
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(),
            },
        )
    _same(optimized(made), one)
    assert not find(made, *EAGER), tunecompile.report(made)


@slow
def plans_of_their_own(rank, ranks):
    """What is computed again is not sent again: the ranks would wait for each other."""
    one, plans = model(full=True), candidates.plans
    candidates.plans = lambda graph: [KEEP, RECOMPUTE]  # to survey a whole layer takes its time
    try:
        made = optimized(_sharded(one), memory="1TiB" if rank else "1KiB")
        _same(made, one)
    finally:
        candidates.plans = plans
    assert bool(tunecompile.report(made).memory["plans"][0]["recompute"]) == (rank == 0)


@slow
def tensors_as_the_readme_says(rank, ranks):
    import transformers

    one, folder = model(full=True), [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if rank == 0:
        one.save_pretrained(folder[0])
    dist.barrier()
    made = of_docs("tp_plan=", {"path": folder[0], "AutoModelForCausalLM": transformers.AutoModelForCausalLM})
    _same(made.train(), one)


# -- pipelines --------------------------------------------------------------------------------------------------------------


class _Stage(nn.Module):
    """Some layers of a Llama; tokens are embedded before the first, logits made behind the last."""

    def __init__(self, of, begin, end):
        super().__init__()
        base = of.get_base_model() if hasattr(of, "get_base_model") else of
        self.embed_tokens = base.model.embed_tokens if begin == 0 else None
        self.rotary_emb, self.layers = base.model.rotary_emb, base.model.layers[begin:end]
        self.norm, self.lm_head = (base.model.norm, base.lm_head) if end == len(base.model.layers) else (None, None)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, hidden):
        hidden = hidden if self.embed_tokens is None else self.embed_tokens(hidden)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotations = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotations)
        return hidden if self.norm is None else self.lm_head(self.norm(hidden))


def _loss(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def _pipelined(schedule, places, rank, full=False, prepare=optimized):
    """places: which of the stages each rank has."""
    from torch.distributed.pipelining import PipelineStage

    count = 2 * sum(map(len, places))
    made, one = (
        zoo.make("llama", num_hidden_layers=count)
        if full
        else zoo.adapt(zoo.make("llama", num_hidden_layers=count), r=8)
        for _ in range(2)
    )
    made, one = made.to(DEVICE).train(), one.to(DEVICE).train()
    parts = [prepare(_Stage(made, 2 * place, 2 * place + 2).train()) for place in places[rank]]
    device = torch.device(DEVICE, rank) if DEVICE == "cuda" else torch.device("cpu")
    stages = [PipelineStage(part, place, count // 2, device) for part, place in zip(parts, places[rank])]
    run = schedule(stages if len(stages) > 1 else stages[0], 4, loss_fn=_loss)
    for seed in range(2):
        for each in (made, one):
            each.zero_grad()
        inputs = batch(seed, rows=8)
        _loss(one(input_ids=inputs["input_ids"]).logits, inputs["labels"]).backward()
        last = {"target": inputs["labels"]} if count // 2 - 1 in places[rank] else {}
        run.step(*([inputs["input_ids"]] if 0 in places[rank] else []), **last)
        found, expected = gradients(made), gradients(one)
        own = {
            name
            for part in parts
            for p in part.parameters()
            for name, q in made.named_parameters()
            if p is q and q.requires_grad
        }
        assert set(found) == own
        worst = zoo.errors(found, {name: expected[name] for name in found})
        assert max(worst.values()) < (1e-3 if DEVICE == "cuda" else 1e-4), max(worst.items(), key=lambda item: item[1])
    return parts


@slow
def stages(rank, ranks):
    from torch.distributed.pipelining import Schedule1F1B

    for part in _pipelined(Schedule1F1B, [[0], [1]], rank):
        whole(part)
        assert {m.family: m.rewritten for m in tunecompile.report(part).matches}["lora"] == 7


@slow
def stages_as_the_readme_says(rank, ranks):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def prepare(part):
        names = {
            "part": part,
            "PipelineStage": PipelineStage,
            "index": rank,
            "stages": ranks,
            "device": torch.device(DEVICE),
        }
        of_docs("PipelineStage(", names)
        return names["part"]

    whole(_pipelined(ScheduleGPipe, [[0], [1]], rank, prepare=prepare)[0])


@slow
def stages_that_interleave(rank, ranks):
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    for full in (False, True):
        _pipelined(ScheduleInterleaved1F1B, [[0, 2], [1, 3]], rank, full)


@slow
def gradients_of_weights_later(rank, ranks):
    """Zero bubble: a backward pass for the stage before, and another for weights."""
    from torch.distributed.pipelining import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

    for full in (False, True):
        _pipelined(ScheduleInterleavedZeroBubble, [[0, 2], [1, 3]], rank, full)
    _pipelined(ScheduleZBVZeroBubble, [[0, 3], [1, 2]], rank)


# -- context parallelism ----------------------------------------------------------------------------------------------------


class _Gathered(torch.autograd.Function):
    """Keys or values of all ranks, one part of the sequence behind the other: [B, H, T, D]."""

    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part.contiguous()) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 2)[dist.get_rank()]


@contextlib.contextmanager
def _everywhere(mesh, buffers):
    """On a GPU torch's own. It has no attention for CPUs: what it would put in the place of torch's gathers keys and values there."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if DEVICE == "cuda":
        from torch.distributed.tensor.experimental import context_parallel

        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
            yield buffers
        return
    from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

    def gather(_, args, kwargs, mesh):
        query, key, value = args[:3]
        assert kwargs.get("is_causal") and kwargs.get("attn_mask") is None
        places = torch.arange(query.shape[2]) + rank * query.shape[2]
        mask = places[:, None] >= torch.arange(ranks * query.shape[2])
        return (query, _Gathered.apply(key), _Gathered.apply(value)), {**kwargs, "is_causal": False, "attn_mask": mask}

    torchs._distribute_function(F.scaled_dot_product_attention, F, mesh, gather, lambda _, inputs, output, mesh: output)
    try:
        yield [buffer.chunk(ranks, 1)[rank].contiguous() for buffer in buffers]
    finally:
        torchs._restore_function(F.scaled_dot_product_attention, F)


def _shared(made, one, count=3, rows=2, length=32):
    """Every rank has a part of each sequence, and the loss of that part."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for seed in range(count):
        for each in (made, one):
            each.zero_grad()
        inputs = batch(seed, rows=rows, length=length)
        one(**inputs).loss.backward()
        labels = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
        positions = torch.arange(length, device=labels.device)[None].clone()
        with _everywhere(mesh, [inputs["input_ids"].clone(), labels.clone(), positions]) as (tokens, shifted, places):
            loss = made(
                input_ids=tokens,
                position_ids=places,
                labels=shifted,
                shift_labels=shifted,
                num_items_in_batch=int((labels != -100).sum()),
            ).loss
            loss.backward()
        for parameter in made.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        alike(made, one)


@slow
def sequences(rank, ranks):
    made = optimized(model())
    _shared(made, model())
    report = tunecompile.report(made)
    assert {m.family: m.rewritten for m in report.matches}["lora"] == 7 and has(report, "attention-outside"), report
    assert report.compiles <= 4 and not find(report, *EAGER), report  # up to attention and behind it, in two functions


@slow
def sequences_of_all_weights_and_then_whole_ones(rank, ranks):
    made, one = optimized(model(full=True)), model(full=True)
    _shared(made, one)
    for each in (made, one):
        each.zero_grad()
        each(**batch(9)).loss.backward()
    alike(made, one)


class _Attends(nn.Module):
    """A layer that calls torch's attention by itself."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        query, key, value = (part.view(*x.shape[:2], 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(
            F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        )


@slow
def sequences_as_the_readme_says(rank, ranks):
    made, one, inputs = optimized(model()), model(), batch(1, rows=2, length=32)
    one(**inputs).loss.backward()
    labels = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    count = int((labels != -100).sum())
    names = {
        "model": made,
        "tokens": inputs["input_ids"].clone(),
        "labels": labels.clone(),
        "count": count,
        "mesh": init_device_mesh(DEVICE, (ranks,)),
        "positions": torch.arange(32, device=DEVICE)[None].clone(),
        "context_parallel": _in_place,
    }
    of_docs("context_parallel(", names)
    for parameter in made.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    alike(made, one)


@contextlib.contextmanager
def _in_place(mesh, buffers, buffer_seq_dims):
    """As torch's, which makes each buffer smaller."""
    if DEVICE == "cuda":
        from torch.distributed.tensor.experimental import context_parallel

        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=buffer_seq_dims):
            yield
        return
    with _everywhere(mesh, buffers) as parts:
        for buffer, part in zip(buffers, parts):
            buffer.set_(part)
        yield


@slow
def layers_that_attend_by_themselves(rank, ranks):
    torch.manual_seed(0)
    one = zoo.Stack(_Attends).to(DEVICE)
    made = zoo.Stack(_Attends).to(DEVICE)
    made.load_state_dict(one.state_dict())
    optimized(made)
    x = torch.randn(2, 32, 16, device=DEVICE)
    one(x).backward()
    with _everywhere(init_device_mesh(DEVICE, (ranks,)), [x.clone()]) as (part,):
        (made(part) / ranks).backward()
    for parameter in made.parameters():
        dist.all_reduce(parameter.grad)
    alike(made, one)
    assert has(made, "ran-eagerly", reason="context-parallel-attention")
