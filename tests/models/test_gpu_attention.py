"""Attention's kernel is chosen by measurement, on a real GPU."""

import json
import time

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.gpu import SHAPE
from tests.support.notes import find
from tunecompile.compiler import attention_backend
from tunecompile.compiler.attention_backend import AttentionCall

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    attention_backend.decide.cache_clear()
    yield tmp_path / "tunecompile"
    attention_backend.decide.cache_clear()


def never(*_):
    raise AssertionError("measured again")


def notes(model) -> list[str]:
    return find(model, "attention-kernel")


def test_measured_stored_and_read_by_the_next_process(folder, monkeypatch):
    inputs = zoo.batch(4099, 2, 256, "cuda")
    for origin in ("measured", "measured before"):
        model = tunecompile.optimize(zoo.make("llama", **SHAPE).to("cuda", torch.bfloat16))
        zoo.step(model, inputs)
        (note,) = notes(model)
        assert note.detail.subject == "2x9/3x256x64 bfloat16, causal" and note.detail.fields["origin"] == origin, note
        (file,) = folder.iterdir()
        stored = json.loads(file.read_text())
        assert (
            stored["key"]["gpu"] == torch.cuda.get_device_name()
            and all(0 < ms < 100 for ms in stored["value"].values())
            and stored["value"]
        )
        torch._dynamo.reset()  # as a new process begins: nothing in memory
        attention_backend.decide.cache_clear()
        monkeypatch.setattr(attention_backend, "time_on_gpu", never)


def test_what_is_measured_first_is_what_runs(monkeypatch):
    """Each backend in turn is said to be the fastest; the profiler names the kernel."""
    kernels = {"cudnn": "_scaled_dot_product_cudnn_attention", "flash": "_scaled_dot_product_flash_attention"}
    inputs = zoo.batch(4099, 2, 256, "cuda")
    for first, name in kernels.items():
        monkeypatch.setattr(
            attention_backend, "time_on_gpu", lambda call, backend, device: 1.0 if backend == first else 2.0
        )
        monkeypatch.setattr(attention_backend.tuning_cache, "read", lambda *_: None)
        attention_backend.decide.cache_clear()
        torch._dynamo.reset()
        model = tunecompile.optimize(zoo.make("llama", **SHAPE).to("cuda", torch.bfloat16))
        zoo.step(model, inputs)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            zoo.step(model, inputs)
        ran = {event.key for event in profile.key_averages()}
        assert any(name in key for key in ran), (first, sorted(key for key in ran if "attention" in key), notes(model))


def test_the_clock_leaves_random_state_and_memory_as_they_were():
    call = AttentionCall(4, 32, 8, 2048, 2048, 128, 128, "bfloat16", True, None, True)
    torch.cuda.synchronize()
    state, held = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    for backend in ("cudnn", "flash"):
        assert 0 < attention_backend.time_on_gpu(call, backend, torch.device("cuda", 0)) < 100
    assert torch.equal(state, torch.cuda.get_rng_state())
    until = time.monotonic() + 5  # autograd's thread drops the last node when it finds the time
    while torch.cuda.memory_allocated() - held >= 64 << 20 and time.monotonic() < until:
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() - held < 64 << 20  # workspaces that libraries keep
    times = attention_backend._measure(
        call, ["cudnn", "flash", "efficient"], torch.device("cuda", 0), attention_backend.time_on_gpu
    )
    assert "efficient" not in times  # fewer heads of k than of q
    assert torch.cuda.memory_allocated() - held < 64 << 20
    with pytest.raises(RuntimeError):
        attention_backend.time_on_gpu(
            AttentionCall(1, 2, 2, 64, 64, 64, 64, "float32", True, None, False), "flash", torch.device("cuda", 0)
        )


def test_memory_that_is_needed_is_bounded_by_what_is_asked_for():
    for call in (
        AttentionCall(4, 32, 8, 2048, 2048, 128, 128, "bfloat16", True, None, False),
        AttentionCall(2, 16, 16, 1024, 1024, 64, 64, "bfloat16", False, ((2, 1, 1024, 1024), "bool"), False),
    ):
        for backend in ("cudnn", "flash", "efficient"):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            try:
                attention_backend.time_on_gpu(call, backend, torch.device("cuda", 0))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                continue
            assert torch.cuda.max_memory_allocated() - before < attention_backend.HEADROOM * call.bytes + (64 << 20), (
                call,
                backend,
            )
