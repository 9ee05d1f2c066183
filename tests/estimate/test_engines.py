"""Engines: what each GPU holds, how long GPUs talk, and what neither more GPUs nor shorter rows may make worse."""

import pytest

from tunecompile.estimate.engines import (
    AHEAD,
    ModelBytes,
    Network,
    ShardedBytes,
    ddp_cost,
    fsdp_cost,
    gathered,
    parts_of,
    replicated,
    sharded,
    whole,
)
from tunecompile.estimate.meta_model import meta_model
from tunecompile.estimate.multi_gpu import MultiGpuPlanner, Question, plan
from tunecompile.planner.datasheets import CONTEXT, GPUS, DatasheetGauge, find_gpu

pytest.importorskip("peft")
H100 = find_gpu("h100")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def parts(trained: float, layers: int = 32) -> ModelBytes:
    """Of 14 GiB of weights in layers, so much of them trained."""
    each = 2**30 * 14 // layers
    layer = ShardedBytes(each, each, int(trained * each), int(4 * trained * each))
    return ModelBytes((layer,) * layers, ShardedBytes(2**30, 2**30, 0, 0), ShardedBytes(2**30, 2**30, 0, 0))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("trained", [0.01, 1.0])
def test_more_gpus_never_give_fewer_tokens_under_ddp(gpu, trained):
    """Machines are full. A step of one GPU takes 450 ms, 300 of them backward."""

    def tokens(gpus: int) -> float:
        return gpus / (450 + ddp_cost(parts(trained), Network(find_gpu(gpu), gpus, 8, 50.0), 300).exposed)

    found = [tokens(gpus) for gpus in SIZES]
    slow = (
        trained == 1.0 and not find_gpu(gpu).nvlink
    )  # 14 GiB over PCIe take longer than the step: a second GPU does not pay
    assert found[1:] == sorted(found[1:]) if slow else found == sorted(found)


def test_gradients_of_adapters_hide_and_those_of_everything_do_not():
    network = Network(H100, 8, 8, 50.0)
    few, all_ = (ddp_cost(parts(trained), network, 300) for trained in (0.01, 1.0))
    assert few.exposed < 1 < few.sent < 3 and all_.exposed < 1
    assert all_.sent == pytest.approx(
        73 + 30, rel=0.02
    )  # 7/8 of 14 GiB twice, at 360 GB/s; 574 buckets, twice 8 hops each
    assert ddp_cost(parts(1.0), network, 10).exposed == pytest.approx(all_.sent - 10, rel=0.01)
    assert ddp_cost(parts(1.0), Network(H100, 1, 8, 50.0), 10).exposed == 0


def test_a_ring_is_as_fast_as_its_slowest_link():
    near, far, slow = Network(H100, 8, 8, 50.0), Network(H100, 16, 8, 50.0), Network(H100, 16, 8, 5.0)
    assert near.bandwidth == 0.8 * 450e6 and far.bandwidth == 0.8 * 8 * 50e6 and slow.bandwidth == 0.8 * 8 * 5e6
    assert near.gather(8 << 30) == pytest.approx(7 / 8 * (8 << 30) / near.bandwidth, rel=0.01) and near.reduce(
        1 << 30
    ) == 2 * near.gather(1 << 30)
    assert (
        near.gather(8 << 30) < far.gather(8 << 30) < slow.gather(8 << 30)
        and Network(H100, 1, 8, 50.0).gather(8 << 30) == 0
    )


def test_what_fsdp_gathers_is_hidden_but_for_the_first():
    network = Network(H100, 8, 8, 50.0)
    slow, fast = (fsdp_cost(parts(1.0), network, forward, 2 * forward, H100.rates.bandwidth) for forward in (1000, 1))
    first = network.gather(parts(1.0).root.shardable) + network.gather(parts(1.0).layers[0].shardable)
    assert first < slow.exposed < 2 * first and fast.exposed > 0.9 * (fast.sent - 3) and slow.sent == fast.sent


def test_what_each_gpu_holds():
    all_, sheet = parts(1.0), DatasheetGauge(H100)
    one, ddp, fsdp = whole(all_, sheet), replicated(all_, sheet), sharded(all_, 8, sheet)
    assert one.weights == ddp.weights == 16 * 2**30 and ddp.gradients == 2 * one.gradients == 28 * 2**30
    assert gathered(all_) == (1 + AHEAD) * 14 * 2**30 // 32 + 2 * 2**30 and fsdp.weights == 2 * 2**30 + gathered(all_)
    assert fsdp.optimizer == one.optimizer // 8 and one.gradients // 8 < fsdp.gradients < one.gradients // 4
    assert [sharded(all_, gpus, sheet).allocated() for gpus in SIZES] == sorted(
        (sharded(all_, gpus, sheet).allocated() for gpus in SIZES), reverse=True
    )


def test_a_model_is_made_of_its_parts():
    plain, packed = (parts_of(meta_model("llama-3.1-8b", mode, 16)) for mode in ("full", "qlora"))
    assert plain.all.weights == pytest.approx(2 * 8.03 * 1e9, rel=0.01) and plain.all.gradients == pytest.approx(
        plain.all.weights, rel=0.01
    )
    assert plain.all.optimizer == 2 * plain.all.gradients and len({layer.weights for layer in plain.layers}) == 1
    linears = sum(layer.weights for layer in plain.layers)
    assert sum(layer.weights - layer.gradients for layer in packed.layers) == pytest.approx(
        linears / 2 * (0.5 + 1 / 64 + 4 / 64 / 256), rel=0.01
    )  # bytes a weight: QLoRA
    assert (
        packed.root == plain.root.__class__(plain.root.weights, plain.root.shardable, 0, 0)
        and packed.layers[0].shardable < packed.layers[0].weights
    )
    assert parts_of(meta_model("llama-3.2-1b", "full", 16)).embedding.weights == 0  # the head's


def question(**changes) -> Question:
    return Question(**{"model": "llama-tiny", "mode": "qlora", "rows": 2, "length": 256, "gpu": H100} | changes)


@pytest.mark.slow
def test_each_gpu_of_a_device_map_has_a_budget_of_its_own():
    def asked(memory):
        return MultiGpuPlanner(question(length=1024, gpus=2, memory=memory)).device_map()

    free = asked(None)
    less = int((free.weights + free.gradients + free.optimizer + free.activations // 2) / 0.95) + CONTEXT
    tight = asked(less)
    assert free.memory is None and free.fits and tight.fits and tight.peak < free.peak and tight.peak <= tight.allowed
    assert (
        tight.step_ms > free.step_ms
        and any(each["recompute"] or each["offload"] for each in tight.plans)
        and tight.most_rows < free.most_rows
    )
    small = MultiGpuPlanner(question(length=1024, gpus=2, gpu=find_gpu(f"h100,memory={less / 2**30}GiB"))).device_map()
    assert small.memory == "auto" and small.fits and small.plans == tight.plans


@pytest.mark.slow
def test_all_engines_are_answered_for_and_the_fastest_is_taken():
    report = plan(question(gpus=4, rows=8, together=True))
    engines = {engine.engine: engine for engine in report.engines}
    assert list(engines) == ["one GPU", "DDP", "FSDP2", "device_map"] and all(engine.fits for engine in report.engines)
    assert (engines["one GPU"].rows, engines["DDP"].rows, engines["FSDP2"].rows, engines["device_map"].rows) == (
        8,
        2,
        2,
        8,
    )
    assert (
        engines["device_map"].step_ms > engines["one GPU"].step_ms
        and engines["FSDP2"].exposed_ms > engines["DDP"].exposed_ms > 0
    )
    best = engines[report.best]
    assert max(engine.tokens_per_s for engine in report.engines) <= 1.03 * best.tokens_per_s and report.reason
    for engine in report.engines:
        assert engine.peak == engine.weights + engine.gradients + engine.optimizer + engine.activations
        assert engine.tokens_per_s == pytest.approx(8 * 256 / engine.step_ms * 1e3)
    assert engines["FSDP2"].gathered > 0 == engines["DDP"].gathered


@pytest.mark.slow
def test_what_does_not_fit_says_what_helps():
    report = plan(question(mode="full", gpu=find_gpu("h100,memory=1GiB"), rows=512, length=2048, gpus=2))
    assert report.best is None and "is nearest" in report.reason
    for engine in report.engines:
        assert not engine.fits and engine.missing > 0 and engine.help and engine.peak > 0
    one = report.engines[0]
    assert one.memory == "auto" and 0 < one.most_rows < 512 and f"{one.most_rows} rows of 2,048 tokens fit" in one.help
    assert (
        plan(question(mode="full", gpu=find_gpu("h100,memory=1GiB"), rows=one.most_rows, length=2048)).best == "one GPU"
    )
