"""Kernels of a first graph are awaited behind the second one's code, and what was to be cached with them is cached then."""

import importlib
import threading

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import FxGraphCache

import tunecompile
from tunecompile._torch.generation import late_kernels
from tunecompile._torch.generation.late_kernels import InductorError, LateKernels


@pytest.fixture
def calls(monkeypatch):
    """What reaches torch, in order."""
    made = []

    def wait(compiler, scope):
        made.append("wait")
        if scope.get("broken"):
            raise RuntimeError("out of resource")

    monkeypatch.setattr(AsyncCompile, "wait", wait)
    monkeypatch.setattr(FxGraphCache, "_save_graph", staticmethod(lambda *args: made.append(("save", *args))))
    return made


class Code:
    def __init__(self, calls):
        self.calls = calls

    def set_triton_bundle(self, bundle):
        self.calls.append("bundle")


def generate(late, calls, save=True, **scope):
    """One graph, as torch compiles it."""
    with late.around():
        AsyncCompile().wait(scope)
        if save:
            FxGraphCache._save_graph("key", "graph")
        late.code = Code(calls)
    calls.append("code")


def test_kernels_of_the_first_graph_come_late(calls):
    before, late = AsyncCompile.wait, LateKernels()
    generate(late, calls)
    assert calls == ["code"] and AsyncCompile.wait is before
    generate(late, calls)
    assert calls == ["code", "wait", ("save", "key", "graph"), "code"]
    late.finish()
    assert calls[4:] == ["wait", "bundle", ("save", "key", "graph")]
    late.finish()
    assert len(calls) == 7


def test_code_that_is_cached_keeps_its_kernels(calls):
    late = LateKernels()
    generate(late, calls, save=False)
    late.finish()
    assert calls == ["code", "wait"]


def test_a_kernel_that_cannot_be_compiled(calls):
    late = LateKernels()
    generate(late, calls, broken=True)
    for _ in range(2):
        with pytest.raises(InductorError, match="out of resource"):
            late.finish()
        generate(late := LateKernels(), calls, broken=True)
    assert not any("save" in call for call in calls)


def test_other_threads_do_not_notice(calls):
    late = LateKernels()
    with late.around():
        other = threading.Thread(target=lambda: (AsyncCompile().wait({}), FxGraphCache._save_graph("theirs")))
        other.start()
        other.join()
    assert calls == ["wait", ("save", "theirs")] and not late.waits and not late.saves


@pytest.mark.parametrize("setting", ["benchmark_fusion", "triton.multi_kernel", "ranks"])
def test_nothing_is_late_where_kernels_run_or_ranks_wait(setting, calls, monkeypatch):
    if setting == "ranks":
        monkeypatch.setattr(late_kernels, "several", lambda: True)
    with config.patch({} if setting == "ranks" else {setting: 1}):
        generate(LateKernels(), calls)
    assert calls == ["wait", ("save", "key", "graph"), "code"]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x).tanh()


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_a_step(broken, monkeypatch):
    """Under Inductor: code, code, then the forward's kernels; and a kernel that fails leaves the layer to torch.compile."""
    torch._dynamo.reset()
    made, wait = [], AsyncCompile.wait
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    inner = compile_fx.compile_fx_inner

    def told(*args, **kwargs):
        code = inner(*args, **kwargs)
        made.append("backward" if kwargs.get("is_backward") else "forward")
        return code

    def awaited(compiler, scope):
        made.append("wait")
        if broken and made.count("wait") == 2:  # the forward's, behind the backward's own
            raise RuntimeError("out of resource")
        return wait(compiler, scope)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", told)
    monkeypatch.setattr(AsyncCompile, "wait", awaited)
    model = nn.Module()
    model.layers = nn.ModuleList(Layer() for _ in range(2))
    model.forward = lambda x: model.layers[1](model.layers[0](x))
    tunecompile.optimize(model)
    x = torch.randn(3, 8, requires_grad=True)
    with config.patch(force_disable_caches=True):
        y = model(x)
        y.sum().backward()
    report = tunecompile.report(model)
    assert made[:4] == ["forward", "wait", "backward", "wait"]
    assert ("kernels-not-combined" in {note.code for note in report.notes}) is broken
    expected = x.detach().requires_grad_()
    z = expected
    for layer in model.layers:
        z = z + layer.linear(z).tanh()
    z.sum().backward()
    torch.testing.assert_close(y, z)
    torch.testing.assert_close(x.grad, expected.grad)
