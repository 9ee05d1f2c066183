"""The choice of attention's kernel: what is read out of a graph, what decides, and that neither a full GPU nor a bad file stops anything."""

import json
import multiprocessing
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.support import zoo
from tunecompile._torch.cuda import attention_order
from tunecompile.compiler import attention_backend, tuning_cache
from tunecompile.compiler import backend as backend_module
from tunecompile.compiler.attention_backend import AttentionCall, rank
from tunecompile.compiler.backend import Backend
from tunecompile.ir.pretend_gpu import as_on_gpu
from tunecompile.passes import PIPELINE
from tunecompile.planner.device_memory import CudaGauge

CUDA = torch.device("cuda", 0)
CALL = AttentionCall(4, 32, 8, 2048, 2048, 128, 128, "bfloat16", True, None, False)
FREE_BYTES = attention_backend._free_bytes  #: itself, not the fixture's
TIMES = {"cudnn": 1.15, "flash": 2.14, "efficient": 4.0}


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A GPU that can be asked its name, and a cache folder of the test's own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning_cache, "machine", lambda device: {"gpu": "test", "capability": [9, 0]})
    monkeypatch.setattr(attention_backend, "_free_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    attention_backend.decide.cache_clear()
    yield tmp_path
    attention_backend.decide.cache_clear()


class Clock:
    """Gives times from a table, counts what it was asked, and refuses what is not in it."""

    def __init__(self, **times):
        self.times, self.asked = times, []

    def __call__(self, call, backend, device):
        self.asked.append(backend)
        if backend not in self.times:
            raise RuntimeError("No available kernel.")
        if isinstance(self.times[backend], Exception):
            raise self.times[backend]
        return self.times[backend]


def decide(clock, call=CALL, enabled=attention_backend.DEFAULT, flash=None):
    return attention_backend.decide(call, CUDA, enabled, flash, clock)


def capture(fn, *args):
    """The graph Dynamo hands to a backend."""
    graphs = []
    torch.compile(fn, backend=lambda gm, inputs: graphs.append(gm) or gm.forward)(*args)
    return graphs[0]


def test_the_fastest_is_first_and_the_reason_is_told():
    choice = decide(Clock(**TIMES))
    assert choice.order == ("cudnn", "flash", "efficient", "math")
    assert (choice.why.code, choice.why.subject) == ("attention-measured", "4x32/8x2048x128 bfloat16, causal")
    assert (
        choice.why.detail == "cudnn 1.15 ms, flash 2.14 ms, efficient 4.00 ms"
        and choice.why.fields["origin"] == "measured"
    )
    assert (
        decide(Clock(cudnn=3.0, flash=2.0, efficient=1.0), enabled=("flash", "efficient", "cudnn", "math")).order[0]
        == "efficient"
    )


def test_noise_does_not_decide():
    assert rank({"cudnn": 1.02, "flash": 1.0, "efficient": 3.0}, attention_backend.DEFAULT) == attention_backend.DEFAULT
    assert rank({"cudnn": 1.05, "flash": 1.0, "efficient": 3.0}, attention_backend.DEFAULT) == (
        "flash",
        "cudnn",
        "efficient",
        "math",
    )
    assert rank({"efficient": 3.0}, attention_backend.DEFAULT) == ("efficient", "cudnn", "flash", "math")
    assert rank({}, attention_backend.DEFAULT) == attention_backend.DEFAULT


def test_measured_once_and_then_read():
    first = Clock(**TIMES)
    decide(first)
    decide(first)
    assert first.asked == ["cudnn", "flash", "efficient"]
    later = Clock(flash=0.1)  # another process
    assert decide(later).why.fields["origin"] == "measured before" and not later.asked
    masked = AttentionCall(**{**CALL.__dict__, "causal": False, "mask": ((4, 1, 2048, 2048), "bool")})
    why = decide(Clock(efficient=3.0), call=masked).why
    assert "dense mask" in why.subject and why.fields["origin"] == "measured"
    why = decide(Clock(), call=masked).why
    assert "dense mask" in why.subject and why.fields["origin"] == "measured before"
    assert decide(Clock(flash=1.0), flash="FA3").order[0] == "flash"  # another implementation under the same name
    assert decide(Clock(flash=1.0), call=AttentionCall(**{**CALL.__dict__, "length": 512})).order[0] == "flash"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1, "value": 2}', None])
def test_a_damaged_file_is_measured_anew(machine, content):
    decide(Clock(**TIMES))
    (file,) = (machine / "tunecompile").iterdir()
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "value": {"cudnn": "fast"}}) if content is None else content
    )
    again = Clock(**TIMES)
    assert decide(again).why.fields["origin"] == "measured" and again.asked
    assert json.loads(file.read_text())["value"] == TIMES


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "below"))
    clock = Clock(**TIMES)
    assert decide(clock).order[0] == "cudnn" and decide(clock).order[0] == "cudnn"
    assert len(clock.asked) == 3  # a process measures a call once all the same


@pytest.mark.parametrize("clock", [Clock(cudnn=torch.OutOfMemoryError("planted")), Clock(cudnn=OSError("planted"))])
def test_a_measurement_that_fails_leaves_the_default_order(clock):
    choice = decide(clock)
    assert choice.order == attention_backend.DEFAULT and choice.why.code == "attention-not-measured"
    assert "planted" in choice.why.detail


def test_long_calls_are_measured_on_few_heads():
    long = replace(CALL, batch=1, length=163840, kv_length=163840)
    assert long.sample() == replace(long, heads=4, kv_heads=1) and CALL.sample() == CALL
    assert replace(long, heads=9, kv_heads=3).sample() == replace(long, heads=3, kv_heads=1)
    masked = replace(long, mask=((1, 1, 163840, 163840), "bool"))
    assert masked.sample() == masked
    asked = []
    choice = attention_backend.decide(
        long, CUDA, attention_backend.DEFAULT, None, lambda call, backend, device: asked.append(call) or TIMES[backend]
    )
    assert set(asked) == {long.sample()} and "1x32/8x163840x128" in choice.why.subject
    assert choice.why.fields["origin"].endswith("on 4 of them")


def test_a_full_gpu_is_left_alone(monkeypatch):
    monkeypatch.setattr(attention_backend, "_free_bytes", lambda device: 2 * CALL.bytes)
    clock = Clock(**TIMES)
    assert decide(clock).order == attention_backend.DEFAULT and not clock.asked


def _keep(folder, value, gate):
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    gate.wait()
    return tuning_cache.keep("test", {"a": 1}, value, lambda value: True)


def test_processes_that_measure_at_once_agree(tmp_path):
    with multiprocessing.get_context("fork").Manager() as manager:
        gate = manager.Barrier(4)
        with multiprocessing.get_context("fork").Pool(4) as pool:
            kept = pool.starmap(_keep, [(str(tmp_path), value, gate) for value in range(4)])
    assert len(set(kept)) == 1
    assert [file.suffix for file in (tmp_path / "tunecompile").iterdir()] == [".json"]


def attention(q, k, v, mask=None, **options):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


def test_what_a_call_is():
    q, k = torch.randn(2, 6, 5, 16), torch.randn(2, 3, 5, 16)
    gm = capture(lambda q, k: attention(q, k, k, is_causal=True, enable_gqa=True, scale=0.1), q, k)
    (node,) = attention_backend._nodes(gm)
    call, device = attention_backend._call(node)
    assert call == AttentionCall(2, 6, 3, 5, 5, 16, 16, "float32", True, None, False) and device.type == "cpu"
    gm = capture(lambda q, mask: attention(q, q, q, mask, dropout_p=0.2), q, torch.ones(2, 1, 5, 5, dtype=torch.bool))
    (node,) = attention_backend._nodes(gm)
    with torch.autocast("cpu", torch.bfloat16):
        call, _ = attention_backend._call(node)
    assert call == AttentionCall(2, 6, 6, 5, 5, 16, 16, "bfloat16", False, ((2, 1, 5, 5), "bool"), True)


def test_calls_in_a_checkpoint_and_of_symbolic_sizes_count():
    from torch.utils.checkpoint import checkpoint

    q = torch.randn(2, 4, 7, 8, requires_grad=True)
    torch._dynamo.mark_dynamic(q, 2)
    gm = capture(lambda q: checkpoint(attention, q, q, q, use_reentrant=False), q)
    assert [attention_backend._call(node)[0].length for node in attention_backend._nodes(gm)] == [7]


def test_the_largest_call_decides(monkeypatch):
    gm = capture(
        lambda q, k: attention(q, q, q) + attention(q, k, k), torch.randn(1, 2, 8, 4), torch.randn(1, 2, 64, 4)
    )
    seen = []
    monkeypatch.setattr(attention_backend, "_enabled", lambda device: attention_backend.DEFAULT)
    attention_backend.choose(gm, "cuda", lambda call, backend, device: seen.append(call.kv_length) or 1.0)
    assert set(seen) == {64}
    assert attention_backend.choose(gm, "cpu") is None


def test_the_users_settings_are_honoured():
    gm = capture(lambda q: attention(q, q, q, is_causal=True), torch.randn(1, 2, 8, 4))
    clock = Clock(flash=2.0, efficient=1.0)
    with attention_order(["flash", "efficient", "math"]):
        assert attention_backend.choose(gm, "cuda", clock).order == ("efficient", "flash", "math") and clock.asked == [
            "flash",
            "efficient",
        ]
    with attention_order(["math"]):
        assert attention_backend.choose(gm, "cuda", clock).order == ("math",)
    torch.use_deterministic_algorithms(True)
    try:
        choice = attention_backend.choose(gm, "cuda", clock)
    finally:
        torch.use_deterministic_algorithms(False)
    assert choice.order == attention_backend.DEFAULT and choice.why.code == "attention-in-fixed-order"
    assert len(clock.asked) == 2


def test_the_timer_leaves_no_trace(monkeypatch):
    """What can be run of it without a GPU: sizes and layouts of what is timed, random state, gradients."""

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            marks.append(self)

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 1.0

    marks = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(attention_backend, "occupy_gpu", lambda: None)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices, fork=torch.random.fork_rng: fork([]))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    state = torch.get_rng_state()
    masked = [("math", mask) for mask in (None, ((1, 1, 6, 6), "bool"), ((6, 6), "bfloat16"))]
    for backend, mask in [*masked, ("blocks", None)]:
        call = AttentionCall(1, 4, 2, 6, 6, 8, 8, "bfloat16", mask is None, mask, False)
        with torch._subclasses.FakeTensorMode(), torch.no_grad(), torch.autocast("cpu", torch.float16):
            marks.clear()
            assert attention_backend.time_on_gpu(call, backend, torch.device("cpu")) == 1.0
        begin, end = marks[:2]
        assert begin is not end and marks == [begin, end] * (1 + attention_backend.RUNS), (
            "one call ahead is not counted"
        )
        assert torch.equal(state, torch.get_rng_state())
        inputs, grad, made = attention_backend._tensors(call, torch.device("cpu"))
        assert sum(t.nbytes for t in (*inputs, grad, made) if t is not None) == call.bytes
        torch.set_rng_state(state)


def test_the_order_reaches_the_trace_and_the_report(monkeypatch):
    """Under a backend that believes to be on a GPU: order while it traces, note, and a cache key of its own."""
    seen = []

    def compiler(gm, inputs, lower, *_, **options):
        seen.append(
            (torch._C._get_sdp_priority_order()[:2], torch.backends.cuda.mem_efficient_sdp_enabled(), lower.uuid())
        )
        return gm.forward

    monkeypatch.setattr(backend_module, "compile_eager", compiler)
    monkeypatch.setattr(attention_backend, "time_on_gpu", Clock(flash=1.0, cudnn=2.0))
    choose = attention_backend.choose
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(attention_backend, "choose", lambda gm, _: choose(gm, device))
        torch._dynamo.reset()
        backend = Backend("layer", PIPELINE, "eager")
        before = torch._C._get_sdp_priority_order()
        torch.compile(lambda q: attention(q, q, q, is_causal=True), backend=backend)(torch.randn(1, 2, 8, 4))
        assert torch._C._get_sdp_priority_order() == before and not backend.failures
        (context,) = backend.contexts
        if device == "cuda":
            (made,) = context.notes
            assert (made.code, made.subject) == (
                "attention-kernel",
                "layer",
            ) and made.detail.code == "attention-measured"
            assert (made.detail.subject, made.detail.detail) == (
                "1x2x8x4 float32, causal",
                "flash 1.00 ms, cudnn 2.00 ms",
            )
    (order, _, on_gpu), (_, _, on_cpu) = seen
    from torch.nn.attention import SDPBackend

    assert order == [SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value] and on_gpu != on_cpu


def test_layers_of_transformers_are_causal_calls():
    """No dense mask where a batch has no padding: else neither cuDNN nor flash could be fast."""
    import tunecompile

    found, choose = [], attention_backend.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            attention_backend,
            "choose",
            lambda gm, device: (
                found.extend(attention_backend._call(node)[0] for node in attention_backend._nodes(gm))
                or choose(gm, device)
            ),
        )
        zoo.step(tunecompile.optimize(zoo.make("llama"), executor="eager"), zoo.batch())
    assert found and all(call.causal and call.mask is None for call in found)


def test_flash_attention_3_is_hinted_at_where_it_would_run(monkeypatch):
    """On Hopper, where its package is there and nothing was switched on."""
    setting = {"cuda": "13.0", "found": True, "impl": None, "capability": (9, 0)}
    monkeypatch.setattr(attention_backend.importlib.util, "find_spec", lambda name: setting["found"] or None)
    monkeypatch.setattr(attention_backend, "current_flash_attention_impl", lambda: setting["impl"])
    monkeypatch.setattr(attention_backend, "capability", lambda device: setting["capability"])

    def codes(**changes):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in changes.items():
                patch.setitem(setting, name, value)
            patch.setattr(torch.version, "cuda", setting["cuda"])
            return [note.code for note in attention_backend.notes()]

    assert codes() == ["flash-attention-3"]
    for name, value in {"cuda": None, "found": False, "impl": "FA3", "capability": (10, 0)}.items():
        assert codes(**{name: value}) == []
    assert codes(capability=(9, 1)) == codes(capability=(8, 0)) == []


def test_what_a_measurement_may_take_is_free_or_cached(monkeypatch):
    monkeypatch.setattr(CudaGauge, "available", lambda self: 10)
    monkeypatch.setattr(CudaGauge, "allocated", lambda self: 3)
    assert FREE_BYTES(CUDA) == 7


WIDE = replace(CALL, head_dim=512, value_dim=512)


def test_blocks_are_a_candidate_for_wide_heads_alone():
    choice = decide(clock := Clock(efficient=4.0, blocks=1.0), call=WIDE)
    assert clock.asked == ["cudnn", "flash", "efficient", "blocks"]
    assert choice.times == (("blocks", 1.0), ("efficient", 4.0)) and choice.rate == WIDE.sample().flops
    assert choice.order == ("efficient", "cudnn", "flash", "math")  # for calls that are not causal
    assert "blocks 1.00 ms, efficient 4.00 ms" in str(choice.why)
    attention_backend.decide.cache_clear()
    decide(clock := Clock(), call=WIDE)
    assert not clock.asked  # read
    for change in (
        {"head_dim": 256, "value_dim": 256},
        {"value_dim": 256},
        {"causal": False},
        {"kv_length": 4096},
        {"dropout": True},
        {"dtype": "float32"},
        {"causal": False, "mask": ((4, 1, 2048, 2048), "bool")},
    ):
        decide(clock := Clock(efficient=4.0, blocks=1.0), call=replace(WIDE, **change))
        assert "blocks" not in clock.asked, change
    decide(clock := Clock(efficient=4.0, blocks=1.0), call=WIDE, enabled=("flash", "efficient", "math"))
    assert "blocks" not in clock.asked  # their user asked for these


@pytest.mark.parametrize(
    "times, takes", [((4.0, 1.0), True), ((1.0, 4.0), False), ((None, 4.0), True), ((4.0, None), False)]
)
def test_blocks_are_taken_where_they_are_the_fastest(monkeypatch, times, takes):
    (node,) = attention_backend._nodes(capture(lambda q: attention(q, q, q, is_causal=True), torch.randn(1, 2, 8, 4)))
    clock = Clock(**{name: ms for name, ms in zip(("efficient", "blocks"), times) if ms is not None})
    monkeypatch.setattr(attention_backend, "time_on_gpu", clock)
    monkeypatch.setattr(attention_backend, "_call", lambda node: (WIDE, CUDA))
    monkeypatch.setattr(attention_backend, "_enabled", lambda device: attention_backend.DEFAULT)
    assert attention_backend.takes_blocks(node) is takes
    asked = len(clock.asked)
    assert attention_backend.takes_blocks(node) is takes and len(clock.asked) == asked
    monkeypatch.setattr(attention_backend, "_call", lambda node: (CALL, CUDA))
    assert not attention_backend.takes_blocks(node) and len(clock.asked) == asked


def test_without_a_gpu_nothing_is_measured():
    (node,) = attention_backend._nodes(
        capture(lambda q: attention(q, q, q, is_causal=True), torch.randn(1, 2, 8, 512, dtype=torch.bfloat16))
    )
    assert not attention_backend.takes_blocks(node)
    with as_on_gpu():
        assert attention_backend.takes_blocks(node)
