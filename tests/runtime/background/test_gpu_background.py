"""Code from the background on a GPU: templates' kernels come with it, and other processes take little of the GPU."""

import copy
import time

import pytest
import torch
from torch._dynamo.utils import counters

import tunecompile
from tests.runtime.background.later import Generated, Keys
from tests.support import zoo
from tests.support.models.gpu import build
from tests.support.notes import EAGER, find

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
PATIENCE = 300  #: seconds
LARGEST = 2 << 30  #: bytes of the GPU that the other processes may take: contexts and some kernels


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No code of another test's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    counters.clear()


def batch(rows: int = 2, length: int = 256, seed: int = 1) -> dict:
    return zoo.batch(4099, rows, length, "cuda", seed=seed)


def same(model, reference, inputs, autocast, usual: float = 2e-2) -> None:
    """Within bf16's noise. usual: error of a gradient, in the median; of the worst one it is ten times as large."""
    loss, ours = zoo.step(model, inputs, autocast)
    expected, theirs = zoo.step(reference, inputs, autocast)
    assert loss.item() == pytest.approx(expected.item(), rel=5e-3)
    errors = sorted(zoo.errors(ours, theirs, 0.01).values())
    assert errors[len(errors) // 2] < usual
    assert errors[-1] < 10 * usual


@pytest.mark.parametrize(
    "family, mode, autocast, usual",  # a token near the border of two experts may go to the other one
    [("llama", "qlora", torch.bfloat16, 2e-2), ("qwen3", "lora", None, 2e-2), ("qwen3_moe", "lora", None, 6e-2)],
)
def test_changing_over(family, mode, autocast, usual, monkeypatch):
    """Catches keys that differ, other numbers op by op, and gigabytes of the other process."""
    model = build(family, mode)
    reference, made = tunecompile.optimize(copy.deepcopy(model), executor="eager"), Generated(monkeypatch)
    free = torch.cuda.mem_get_info()[0]
    held = torch.cuda.memory_reserved()
    keys = Keys(monkeypatch)
    tunecompile.optimize(model, warmup="background")
    same(model, reference, batch(), autocast, usual)
    same(model, reference, batch(3, 200), autocast, usual)
    assert made.graphs == 0
    until, seed = time.monotonic() + PATIENCE, 2
    while find(model, "waits-for-code") or not find(model, "changed-over"):
        same(model, reference, batch(seed=seed), autocast, usual)
        same(model, reference, batch(3, 200, seed=seed), autocast, usual)
        assert time.monotonic() < until, tunecompile.report(model)
        seed += 1
    taken = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - held)
    assert taken < LARGEST
    same(model, reference, batch(seed=seed), autocast, usual)
    same(model, reference, batch(3, 200, seed=seed), autocast, usual)
    if made.graphs:
        pytest.fail("\n".join(keys.differences()))
    assert counters["inductor"]["fxgraph_cache_hit"] >= 4
    assert not find(model, *EAGER, "not-from-background", "compiled-at-once"), tunecompile.report(model)


def test_recordings_begin_with_code(monkeypatch):
    """What runs op by op is recorded by nobody: its random numbers, for one, are the host's."""
    model = build("llama", "qlora")
    tunecompile.optimize(model, warmup="background")
    replays, until = model._tunecompile.replays, time.monotonic() + PATIENCE
    while not find(model, "changed-over"):
        zoo.step(model, batch(2, 64), torch.bfloat16)
        if find(model, "waits-for-code"):
            assert replays.recorded == 0
        assert time.monotonic() < until, tunecompile.report(model)
    for seed in range(6):
        zoo.step(model, batch(2, 64, seed=seed), torch.bfloat16)
    assert not replays.failures, tunecompile.report(model)


def test_packed_rows_take_no_memory_of_all_pairs(monkeypatch):
    """Attention in documents runs by its kernel, also op by op."""
    model = build("llama", "lora")
    tunecompile.optimize(model, warmup="background")
    inputs = zoo.batch(4099, 1, 8192, "cuda")
    lengths = [3000, 5192]
    inputs["position_ids"] = torch.cat([torch.arange(n, device="cuda") for n in lengths])[None]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    zoo.step(model, inputs)
    pairs = 4 * 9 * max(lengths) ** 2  # bytes of scores in fp32
    assert torch.cuda.max_memory_allocated() - before < 2 * pairs
