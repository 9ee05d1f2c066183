"""DeepSpeed's ZeRO: stage 2 shards gradients and the optimizer's state, stage 3 weights as well, which it gathers for each layer."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch

import tunecompile
from tests.integrations.distributed.common import (
    DEVICE,
    batch,
    model,
    of_docs,
    optimized,
    packed,
    part,
    unrecorded,
    whole,
)
from tests.integrations.distributed.ranks import slow
from tests.support import zoo
from tests.support.notes import has
from tunecompile.errors import CannotMerge, CannotVerify

if DEVICE == "cpu":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _config(stage, **options):
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        **options,
    }  # nothing is so small that it stays whole
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _engine(made, config):
    import deepspeed

    if not torch.distributed.is_initialized() or deepspeed.comm.comm.cdb is None:
        deepspeed.init_distributed("nccl" if DEVICE == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False)
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.1)
    return deepspeed.initialize(model=made, optimizer=optimizer, config=config)[0]


def _gradients(engine):
    from deepspeed.utils import safe_get_full_grad

    return {name: safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters() if p.requires_grad}


def _weights(engine):
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters() if p.requires_grad
    }


def _steps(
    engine,
    one,
    rank,
    ranks,
    count=3,
    limit=1e-3 if DEVICE == "cuda" else 1e-4,
    loss_of=lambda made, inputs: made(**inputs).loss,
):
    """As many as it takes for DeepSpeed to know the order of modules, and gather ahead."""
    optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
    for seed in range(count):
        loss_of(one, batch(seed)).backward()
        engine.backward(loss_of(engine, part(batch(seed), rank, ranks)))
        worst = zoo.errors(
            _gradients(engine), {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
        )
        assert max(worst.values()) < limit, max(worst.items(), key=lambda item: item[1])
        engine.step(), optimizer.step(), optimizer.zero_grad()
    worst = zoo.errors(_weights(engine), {name: p.detach() for name, p in one.named_parameters() if p.requires_grad})
    assert max(worst.values()) < limit, max(worst.items(), key=lambda item: item[1])


def _found(made, **expected):
    rewritten = {m.family: m.rewritten for m in tunecompile.report(made).matches}
    assert {family: rewritten[family] for family in expected} == expected, tunecompile.report(made)


def stage_2(rank, ranks):
    made = optimized(model())
    _steps(_engine(made, _config(2)), model(), rank, ranks)
    whole(made)
    _found(made, lora=7, linear_cross_entropy=1)


def stage_3(rank, ranks):
    """Also where `torch.nn.functional.linear` is DeepSpeed's own."""
    made = optimized(model())
    _steps(_engine(made, _config(3)), model(), rank, ranks)
    whole(made)
    unrecorded(made)
    _found(made, lora=7, linear_cross_entropy=1, rope=2, swiglu=1)


@slow
def as_the_readme_says(rank, ranks):
    import deepspeed

    made, config = model(), {**_config(3), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    names = {"model": made, "deepspeed": deepspeed, "config": config}
    of_docs("deepspeed.initialize(", names)
    _steps(names["engine"], model(), rank, ranks)
    whole(made)


@slow
def all_weights_of_stage_2_wrapped_before(rank, ranks):
    made = model(full=True)
    engine = _engine(made, _config(2))
    optimized(made)
    _steps(engine, model(full=True), rank, ranks)
    whole(made)


@slow
def all_weights_of_stage_3_wrapped_and_trained_before(rank, ranks):
    """DeepSpeed has learnt the order of modules by then."""
    made, one = model(full=True), model(full=True)
    engine = _engine(made, _config(3))
    _steps(engine, one, rank, ranks)
    optimized(made)
    _steps(engine, one, rank, ranks)
    whole(made)
    _found(made, linear_cross_entropy=1, swiglu=1)


@slow
def evaluated_between_and_restored(rank, ranks):
    made, one = optimized(model()), model()
    engine = _engine(made, _config(3))
    for _ in range(2):
        _steps(engine, one, rank, ranks, count=2)
        engine.eval(), one.eval()
        with torch.no_grad():
            torch.testing.assert_close(engine(**batch(7)).logits, one(**batch(7)).logits, atol=1e-3, rtol=1e-3)
        engine.train(), one.train()
    whole(made)
    tunecompile.restore(made)
    assert not any("_z3_leaf" in vars(module) for module in made.modules())
    _steps(engine, one, rank, ranks, count=2)


@slow
def weights_in_parts_are_not_read(rank, ranks):
    made = optimized(model())
    engine = _engine(made, _config(3))
    with pytest.raises(CannotVerify, match="as soon as"):  # DeepSpeed takes gradients then
        tunecompile.verify(made, part(batch(), rank, ranks))
    with pytest.raises(CannotMerge, match="GatheredParameters"):
        tunecompile.save_merged(made, tempfile.mkdtemp())
    _steps(engine, model(), rank, ranks, count=1)


@slow
def no_view_of_a_gathered_weight_is_kept(rank, ranks):
    """It would keep the weight that DeepSpeed frees after the layer's forward."""
    made = optimized(model(full=True))
    engine = _engine(made, _config(3, stage3_prefetch_bucket_size=0))
    kept = []

    def pack(saved):
        gathered = {p.untyped_storage().data_ptr() for p in made.parameters() if p.numel()}
        kept.extend(
            [tuple(saved.shape)]
            if saved.untyped_storage().data_ptr() in gathered and not isinstance(saved, torch.nn.Parameter)
            else []
        )
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = engine(**part(batch(), rank, ranks)).loss
    assert not kept and not any(p.numel() for p in made.parameters()), kept
    engine.backward(loss)
    engine.step()
    assert not any(p.numel() for p in made.parameters())


@slow
def offloaded(rank, ranks):
    """Weights, gradients and the optimizer's state wait on the host. (Where there is no GPU, that is where they are.)"""
    for stage in (2, 3):
        options = {
            "offload_optimizer": {"device": "cpu"},
            **({"offload_param": {"device": "cpu"}} if stage == 3 else {}),
        }
        for full in (False, True):
            torch._dynamo.reset()
            made = optimized(model(full=full))
            _steps(_engine(made, _config(stage, **options)), model(full=full), rank, ranks)
            whole(made)


@slow
def four_bits(rank, ranks):
    for stage in (2, 3):
        torch._dynamo.reset()
        made = optimized(packed())
        _steps(_engine(made, _config(stage)), packed(), rank, ranks)
        whole(made)
        _found(made, nf4=7, lora=7)


@slow
def made_in_shards(rank, ranks):
    """As transformers loads a model for stage 3."""
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=_config(3)):
        sharded = model(full=True)
    with deepspeed.zero.GatheredParameters(list(sharded.parameters()), modifier_rank=0):
        if rank == 0:
            sharded.load_state_dict(model(full=True).state_dict())
    made = optimized(sharded)
    _steps(_engine(made, _config(3)), model(full=True), rank, ranks)
    whole(made)


@slow
def leaves_of_the_users(rank, ranks):
    import deepspeed

    made = model(full=True)
    deepspeed.utils.set_z3_leaf_modules(made, ["LlamaDecoderLayer"])
    engine = _engine(optimized(made), _config(3))
    _steps(engine, model(full=True), rank, ranks)
    whole(made)
    tunecompile.restore(made)
    assert all(module._z3_leaf for module in made.model.layers)


@slow
def checkpointed(rank, ranks):
    for full in (False, True):
        torch._dynamo.reset()
        made, one = optimized(model(full=full)), model(full=full)
        for each in (made, one):
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        _steps(_engine(made, _config(3)), one, rank, ranks)
        whole(made)


@slow
def accumulated(rank, ranks):
    made, one = optimized(model()), model()
    engine = _engine(made, {**_config(3), "gradient_accumulation_steps": 2})
    for seed in range(2):
        (one(**batch(seed)).loss / 2).backward()
        engine.backward(engine(**part(batch(seed), rank, ranks)).loss)
        if seed == 1:
            worst = zoo.errors(
                _gradients(engine), {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
            )
            assert max(worst.values()) < 1e-3, max(worst.items(), key=lambda item: item[1])
        engine.step()


def _refused(made):
    """Why the head's logits are computed."""
    return next(m for m in tunecompile.report(made).matches if m.family == "linear_cross_entropy").refused


@slow
def a_loss_of_the_loops_own(rank, ranks):
    """The head's logits pass through DeepSpeed's hooks then: they are real, and the report says so."""

    def loss_of(made, inputs):
        logits = made(input_ids=inputs["input_ids"]).logits
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), inputs["labels"][:, 1:].flatten()
        )

    for stage, said in ((2, ""), (3, "model-without-loss")):
        for full in (False, True):
            torch._dynamo.reset()
            made = optimized(model(full=full))
            _steps(_engine(made, _config(stage)), model(full=full), rank, ranks, loss_of=loss_of)
            whole(made)
            assert not said or has(_refused(made), "head-gathered", reason=said)


@slow
def logits_read_beside_the_loss(rank, ranks):
    def loss_of(made, inputs):
        output = made(**inputs)
        return output.loss + 1e-2 * output.logits.float().square().mean()

    for full in (False, True):
        torch._dynamo.reset()
        made = optimized(model(full=full))
        _steps(_engine(made, _config(3)), model(full=full), rank, ranks, loss_of=loss_of)


@slow
def an_adapted_head(rank, ranks):
    def adapted():
        return (
            zoo.adapt(zoo.make("llama", num_hidden_layers=2), target_modules=["q_proj", "lm_head"]).to(DEVICE).train()
        )

    made = optimized(adapted())
    _steps(_engine(made, _config(3)), adapted(), rank, ranks)
    assert has(_refused(made), "head-gathered", reason="head-no-linear")


@slow
def in_half_precision(rank, ranks):
    """As far from fp32 as without `optimize`."""
    for stage in (2, 3):
        torch._dynamo.reset()
        found = []
        for wrap in (optimized, lambda made: made):
            engine = _engine(wrap(model(full=True)), {**_config(stage), "bf16": {"enabled": True}})
            engine.backward(engine(**part(batch(), rank, ranks)).loss)
            found.append(_gradients(engine))
        assert max(zoo.errors(*found).values()) < 0.05


@slow
def within_a_budget(rank, ranks):
    made = optimized(model(), memory="1GiB")
    _steps(_engine(made, _config(3)), model(), rank, ranks)
    assert tunecompile.report(made).memory["plans"]
