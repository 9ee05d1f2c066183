"""Where segments of torch's allocator may grow: the allocator is a stand-in."""

import sys

import pytest
import torch

from tunecompile._torch import cuda


@pytest.fixture
def asked(monkeypatch):
    """What the allocator was asked, on Linux and a GPU of NVIDIA's that has memory."""
    asked = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(cuda, "_configured", lambda: "")
    monkeypatch.setattr(cuda, "_configure", asked.append)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch, "empty", lambda *size, **options: None)
    return asked


def test_they_grow(asked):
    assert cuda.grow_segments() and asked == ["expandable_segments:True"]


@pytest.mark.parametrize(
    "forbid",
    [
        lambda patch: patch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128"),
        lambda patch: patch.setattr(cuda, "_configured", lambda: "expandable_segments:True"),
        lambda patch: patch.setattr(sys, "platform", "win32"),
        lambda patch: patch.setattr(torch.version, "hip", "7.0"),
        lambda patch: patch.setitem(sys.modules, "vllm", object()),
        lambda patch: patch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync"),
        lambda patch: patch.setattr(cuda, "_configure", None),
    ],
    ids=["by the user", "already", "Windows", "AMD", "vLLM", "other allocator", "not in this torch"],
)
def test_they_stay_whole(forbid, asked, monkeypatch):
    forbid(monkeypatch)
    assert not cuda.grow_segments() and not asked


@pytest.mark.parametrize("error, grows", [(torch.OutOfMemoryError, True), (RuntimeError, False)])
def test_a_gpu_that_cannot_map_memory_gets_whole_ones(error, grows, asked, monkeypatch):
    def fails(*size, **options):
        raise error("no")

    monkeypatch.setattr(torch, "empty", fails)
    assert cuda.grow_segments() is grows and (asked[-1] == "expandable_segments:True") is grows
