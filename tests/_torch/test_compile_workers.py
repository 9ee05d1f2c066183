"""Kernels are sent to compile workers while these come up."""

import os
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import async_compile
from torch._inductor.async_compile import AsyncCompile

from tunecompile._torch import compile_workers, cuda


@pytest.fixture
def future(monkeypatch):
    """Of the job that tells that the workers are there."""
    future = Future()
    monkeypatch.setattr(AsyncCompile, "_ready_future", None)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: setattr(AsyncCompile, "_ready_future", future))
    return future


def test_kernels_are_sent_before_workers_are_there(future):
    compile_workers.start_compile_workers(None)
    assert AsyncCompile.use_process_pool()
    future.set_result("ready")
    assert AsyncCompile.use_process_pool()
    AsyncCompile.wait_pool_ready()


def test_workers_that_do_not_come_up_get_no_more(future, monkeypatch):
    monkeypatch.setattr(compile_workers, "PATIENCE", 0.0)
    compile_workers.start_compile_workers(None)
    assert not AsyncCompile.use_process_pool()
    future.set_result("ready")
    assert AsyncCompile.use_process_pool()


def test_workers_that_are_there_stay_torchs(future):
    future.set_result("ready")
    compile_workers.start_compile_workers(None)
    assert AsyncCompile._ready_future is future


def test_without_workers_nothing_is_sent(monkeypatch):
    monkeypatch.setattr(AsyncCompile, "_ready_future", None)
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: None)
    compile_workers.start_compile_workers(None)
    assert AsyncCompile._ready_future is None


def test_many_kernels_are_sent_before_one_is_read(future, monkeypatch):
    """Of 64 KiB, what a pipe has by itself, a dozen are full."""
    read, write = os.pipe()
    with os.fdopen(read, "rb"), os.fdopen(write, "wb") as pipe:
        monkeypatch.setattr(AsyncCompile, "process_pool", lambda: SimpleNamespace(write_pipe=pipe))
        compile_workers.start_compile_workers(None)
        os.set_blocking(write, False)
        assert os.write(write, bytes(1 << 19)) == 1 << 19


@pytest.mark.gpu
def test_attention_is_loaded_beside_all_else():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before, held = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    cuda.load_attention(torch.device("cuda", 0))
    assert torch.equal(torch.cuda.get_rng_state(), before) and torch.cuda.memory_allocated() == held
    q, k, v = (torch.randn(2, 4, 256, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    begin = time.monotonic()
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 1.0  # 2.3 to 5 s otherwise


@pytest.mark.slow
def test_what_is_sent_early_is_done():
    """By torch's real processes."""
    async_compile.shutdown_compile_workers()
    try:
        compile_workers.start_compile_workers(None)
        begin, early = time.monotonic(), not AsyncCompile._ready_future._future.done()
        assert AsyncCompile.use_process_pool() and early
        job = AsyncCompile.process_pool().submit(os.getpid)
        assert job.result(timeout=300) != os.getpid()
        assert time.monotonic() - begin > 0.5  # they had to come up
    finally:
        async_compile.shutdown_compile_workers()
