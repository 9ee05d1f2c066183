"""A compiled graph's first call tunes its kernels with few runs of each configuration, and torch's own setting stays."""

import pytest
from torch._inductor.runtime import triton_heuristics

from tunecompile._torch.generation.quick_tuning import tuned_quickly


class Benchmarker:
    def __init__(self):
        self.asked = []

    def benchmark(self, *args, **kwargs):
        self.asked.append(kwargs)
        return 1.0


@pytest.fixture
def benchmarker(monkeypatch):
    plain = Benchmarker()
    monkeypatch.setattr(triton_heuristics, "benchmarker", plain)
    return plain


def launch(args):
    """As a tuned kernel does in its first launch."""
    for device in ("cuda", "cpu"):
        triton_heuristics.benchmarker.benchmark(fn=None, device=device, rep=40)
    if args == ["broken"]:
        raise RuntimeError
    return args


def test_the_first_call_alone_tunes_quickly(benchmarker):
    call = tuned_quickly(launch)
    assert call([1]) == [1] and triton_heuristics.benchmarker is benchmarker
    on_gpu, on_cpu = benchmarker.asked
    assert on_gpu["benchmark_iters"] < 100 and on_gpu["rep"] == 40 and "benchmark_iters" not in on_cpu
    call([2])
    assert "benchmark_iters" not in benchmarker.asked[2]


def test_a_call_that_fails_leaves_torch_as_it_was(benchmarker):
    call = tuned_quickly(launch)
    with pytest.raises(RuntimeError):
        call(["broken"])
    assert triton_heuristics.benchmarker is benchmarker
    call([1])
    assert "benchmark_iters" in benchmarker.asked[2]


def test_two_at_once_leave_torch_as_it_was(benchmarker):
    """Graphs of two GPUs, say, in threads of their own."""
    outer = tuned_quickly(lambda args: tuned_quickly(launch)(args))
    outer([1])
    assert triton_heuristics.benchmarker is benchmarker and len(benchmarker.asked) == 2
