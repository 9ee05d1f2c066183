"""On a real GPU: whatever the streams' timing, gradients are bit for bit the same; memory is freed, and copies hide behind the layers."""

import gc
import random

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.compare import equal_bits
from tests.support.memory.offload_stack import Stack, wrap
from tests.support.notes import EAGER, find
from tunecompile.runtime.memory.host.pinned_pool import CudaCopyEngine
from tunecompile.runtime.memory.offload import Offload

pytestmark = pytest.mark.gpu
MIB = 1 << 20


class Jitter(CudaCopyEngine):
    """Streams stall now and then, for up to a millisecond or two."""

    random = random.Random(0)

    def _copy(self, direction, stream, pairs):
        for where in (stream, torch.cuda.current_stream(self.device)):
            if self.random.random() < 0.4:
                with torch.cuda.stream(where):
                    torch.cuda._sleep(self.random.randrange(3_000_000))
        return super()._copy(direction, stream, pairs)


class Littering(nn.Module):
    """Overwrites whatever memory the allocator believes to be free, before and after the layer and in its backward."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        litter(x)
        x = self.layer(x)
        x.register_hook(litter)
        return x


def litter(like: torch.Tensor) -> None:
    for factor in (1, 1, 2, 2, 4):
        torch.full((factor * like.numel(),), float("nan"), dtype=like.dtype, device=like.device)


def stack(layers: int, width: int, dtype=torch.bfloat16, **options) -> Stack:
    return Stack(layers, width, **options).to("cuda", dtype)


def run(model: Stack, x: torch.Tensor) -> tuple:
    loss = model(x)
    loss.backward()
    return loss.detach(), model.gradients()


def inputs(tokens: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        tokens, width, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=torch.bfloat16
    )


@pytest.mark.parametrize("host_mib, on_disk", [(4096, False), (40, False), (96, True)])
@pytest.mark.parametrize("ahead", [1, 2])
def test_any_timing(host_mib, on_disk, ahead, tmp_path):
    model = stack(24, 512)
    model.layers = nn.ModuleList(Littering(layer) for layer in model.layers)
    expected = [run(model, inputs(2048, 512, seed)) for seed in range(4)]
    model.offload = Offload(
        torch.device("cuda"),
        host_mib * MIB,
        tmp_path if on_disk else None,
        ahead,
        copier=Jitter(torch.device("cuda", 0)),
    )
    for repeat in range(4):
        for seed, reference in enumerate(expected):
            if repeat % 2:
                model(inputs(2048, 512, 9))  # no backward comes
            assert equal_bits(run(model, inputs(2048, 512, seed)), reference), (repeat, seed)
    report = model.offload.report()
    assert report["host_bytes"] == 0 and report["bytes_out"] >= report["bytes_back"] > 0
    assert bool(report["refusals"]) == (host_mib == 40) and bool(report["disk_bytes"]) == on_disk


def test_two_forwards_and_backward_twice():
    model = stack(16, 512)
    reference = []
    for offload in (None, Offload(torch.device("cuda"), 4096 * MIB, copier=Jitter(torch.device("cuda", 0)))):
        model.offload = offload
        first, second = model(inputs(4096, 512, 0)), model(inputs(4096, 512, 1))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        reference.append((first.detach(), model.gradients()))
        del first, second
    assert equal_bits(*reference) and offload.report()["host_bytes"] == 0


def peak(model: Stack, x: torch.Tensor) -> int:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(model, x)
    return torch.cuda.max_memory_allocated() - before


def test_memory_is_freed_although_the_host_is_far_ahead():
    model, x = stack(24, 1024), inputs(16384, 1024)
    run(model, x)
    without = peak(model, x)
    model.offload = Offload(torch.device("cuda"), 16 << 30)
    run(model, x)
    with_offload, moved = peak(model, x), model.offload.report()["bytes_out"]
    layer = moved / 24
    assert without - with_offload > moved - 5 * layer, (without / MIB, with_offload / MIB, moved / MIB)


def test_copies_hide_behind_the_layers():
    """Each layer's input is offloaded, as with a checkpoint in each: 64 MiB a layer of 8,192 tokens."""
    width = 4096
    model, x = stack(12, width, keep_last=True), inputs(8192, width)
    offload = model.offload = Offload(torch.device("cuda"), 16 << 30)
    inner = offload.layer
    offload.layer = lambda index, module, offloads=None: inner(
        index, module, offloads or (lambda tensor: tensor.shape[-1] == width)
    )
    for _ in range(3):
        run(model, x)
    report = offload.report()
    copied = report["copied_out_ms"] + report["copied_back_ms"]
    assert (
        report["bytes_out"] == 10 * 64 * MIB
    )  # the last layer keeps, and the first one's input is ours: it outlives the step
    assert report["exposed_ms"] < 0.05 * copied, report


@pytest.mark.parametrize("mode", ["lora", "qlora", "checkpointed"])
def test_compiled_layers(mode):
    pytest.importorskip("bitsandbytes" if mode == "qlora" else "peft")
    shape = dict(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=4096,
        max_position_embeddings=4096,
    )
    model = zoo.make("llama", **shape).to("cuda", torch.bfloat16)
    model = zoo.adapt(zoo.quantize(model, torch.bfloat16) if mode == "qlora" else model, r=16)
    if mode == "checkpointed":
        model.gradient_checkpointing_enable()
        model.get_base_model().model.layers[-1].gradient_checkpointing = False  # that of all layers would be a budget
    tunecompile.optimize(model)
    for region in model._tunecompile.regions:
        region.replays = None  # what a CUDA graph saves lies in its own memory, and is not for offloading
    batch = zoo.batch(4096, 2, 2048, "cuda")
    references = [zoo.step(model, batch, torch.bfloat16) for _ in range(4)]
    offload = Offload(torch.device("cuda"), 16 << 30, copier=Jitter(torch.device("cuda", 0)))
    wrap(model, offload)
    for _ in range(4):
        offload.begin_step()
        loss, gradients = zoo.step(model, batch, torch.bfloat16)
        noise = max(max(zoo.errors(other, references[0][1]).values()) for _, other in references[1:])
        if noise == 0:
            assert equal_bits((loss, gradients), references[0])
        else:  # attention's backward adds up in any order; bytes of another tensor would change far more
            assert max(zoo.errors(gradients, references[0][1]).values()) <= max(4 * noise, 5e-3)
    report = offload.report()
    assert report["bytes_out"] > 0 and report["host_bytes"] == 0 and not report["refusals"]
    layer_input, by_layer = 2 * 2048 * 1024 * 2, sorted(report["bytes_out_by_layer"].values())
    if mode == "checkpointed":  # all but the last one
        assert layer_input <= by_layer[-2] < 5 * layer_input, by_layer
    else:
        assert by_layer[-1] > 5 * layer_input, by_layer
    assert not find(model, *EAGER)
