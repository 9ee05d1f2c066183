"""Torch analyses a Triton kernel once for arguments of the same types."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._higher_order_ops import triton_kernel_wrap
from torch._subclasses.fake_tensor import FakeTensorMode

import tunecompile
from tests.support import zoo
from tests.support.models.gpu import build
from tests.support.notes import EAGER, find
from tunecompile._torch import known_bugs
from tunecompile._torch.triton_analysis import analyses_answered_by
from tunecompile.compiler import backend
from tunecompile.compiler.kernel_access_cache import ACCESSES, AccessCache, access_key

ANALYSIS = next(
    name for name in ("identify_accessed_tensors", "identify_mutated_tensors") if hasattr(triton_kernel_wrap, name)
)


@pytest.fixture
def asked(monkeypatch):
    """The analyses that reach torch."""
    questions = []

    def analyse(kernel, kwargs, descriptors):
        questions.append((kernel, dict(kwargs)))
        return [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]

    analyse.__name__ = ANALYSIS
    monkeypatch.setattr(triton_kernel_wrap, ANALYSIS, analyse)
    return questions


def ask(kernel, kwargs, descriptors=None):
    return getattr(triton_kernel_wrap, ANALYSIS)(kernel, kwargs, descriptors or {})


def fake(*sizes, dtype=torch.bfloat16):
    with FakeTensorMode():
        return torch.empty(sizes, dtype=dtype)


def test_one_answer_for_arguments_alike(asked):
    kernel = object()
    with analyses_answered_by(AccessCache().answer):
        first = ask(kernel, {"x": fake(4, 8), "n": 8, "BLOCK": 64})
        assert ask(kernel, {"BLOCK": 64, "n": 8, "x": fake(2)}) == first == ["x"]
    assert len(asked) == 1


def test_layers_of_all_kinds_share_the_answers(asked, monkeypatch):
    """Compiled one after the other, at numbers and at symbols."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    monkeypatch.setattr(ACCESSES, "_known", {})
    kernel, compile_eager = SimpleNamespace(params=Kernel.params), backend.compile_eager

    def compiling(*args, **kwargs):
        ask(kernel, {"x": fake(4), "n": 8 if not asked else ShapeEnv().create_unbacked_symint(), "BLOCK": 64})
        return compile_eager(*args, **kwargs)

    monkeypatch.setattr(backend, "compile_eager", compiling)
    for layer in (nn.Linear(4, 4), nn.LayerNorm(4)):
        tunecompile.optimize(layer, executor="eager")(torch.randn(2, 4)).sum().backward()
    assert len(asked) == 1


def test_what_a_caller_changes_is_its_own(asked):
    kernel = object()
    with analyses_answered_by(AccessCache().answer):
        ask(kernel, {"x": fake(4)}).append("y")
        assert ask(kernel, {"x": fake(4)}) == ["x"]


@pytest.mark.parametrize(
    "other",
    [
        {"x": fake(4, dtype=torch.float32), "n": 8, "on": True},
        {"x": fake(4), "n": 16, "on": True},
        {"x": fake(4), "n": 8, "on": 1},
        {"x": fake(4), "n": 8.0, "on": True},
        {"x": None, "n": 8, "on": True},
        {"y": fake(4), "n": 8, "on": True},
    ],
)
def test_no_answer_for_what_differs(asked, other):
    kernel = object()
    with analyses_answered_by(AccessCache().answer):
        ask(kernel, {"x": fake(4), "n": 8, "on": True})
        ask(kernel, other)
    assert len(asked) == 2


def test_each_kernel_is_analysed_for_itself(asked):
    with analyses_answered_by(AccessCache().answer):
        ask(object(), {"x": fake(4)})
        ask(object(), {"x": fake(4)})
    assert len(asked) == 2


class Kernel:
    """As triton.jit makes one of `def kernel(x, n, BLOCK: tl.constexpr)`."""

    params = [
        SimpleNamespace(name="x", is_constexpr=False),
        SimpleNamespace(name="n", is_constexpr=False),
        SimpleNamespace(name="BLOCK", is_constexpr=True),
    ]


def tuned(kernel, *choices):
    """As triton.autotune makes one."""
    return SimpleNamespace(fn=kernel, configs=[SimpleNamespace(kwargs=choice) for choice in choices])


@pytest.mark.parametrize("kernel", [Kernel(), tuned(Kernel())], ids=["kernel", "tuned"])
def test_numbers_are_alike(kernel):
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment = ShapeEnv()
    first, second = environment.create_unbacked_symint(), environment.create_unbacked_symint()
    one, *others = ({"n": n, "BLOCK": 64} for n in (first, second, first.node.expr, 2, 4096))
    assert all(access_key(kernel, one, {}) == access_key(kernel, other, {}) for other in others)


@pytest.mark.parametrize(
    "other",
    [
        {"n": 1, "BLOCK": 64},
        {"n": 0, "BLOCK": 64},
        {"n": True, "BLOCK": 64},
        {"n": 2.0, "BLOCK": 64},
        {"n": 2**31, "BLOCK": 64},
        {"n": None, "BLOCK": 64},
        {"n": 4096, "BLOCK": 32},
    ],
)
def test_numbers_that_triton_looks_at_are_not(other):
    assert access_key(Kernel(), {"n": 4096, "BLOCK": 64}, {}) != access_key(Kernel(), other, {})


def test_launches_with_options_share_the_answer(asked):
    """torch wraps the kernel anew for each of them, and takes the wrapper off when it lowers them."""
    kernel = Kernel()
    with analyses_answered_by(AccessCache().answer):
        for launched in (tuned(kernel, {}), tuned(kernel, {}), kernel):
            ask(launched, {"x": fake(4), "n": 8, "BLOCK": 64})
        for launched in (tuned(kernel, {"BLOCK": 64}), tuned(kernel, {"BLOCK": 32}, {"BLOCK": 64})):
            ask(launched, {"x": fake(4), "n": 8})
    assert len(asked) == 2  # the second one with BLOCK=32


@pytest.mark.parametrize("kwargs, descriptors", [({"x": [1]}, {}), ({"x": 1}, {"x": "a TMA descriptor"})])
def test_what_is_not_known_is_analysed_each_time(asked, kwargs, descriptors):
    kernel = object()
    with analyses_answered_by(AccessCache().answer):
        ask(kernel, kwargs, descriptors)
        ask(kernel, kwargs, descriptors)
    assert len(asked) == 2


def test_torch_is_as_it_was(asked):
    before = getattr(triton_kernel_wrap, ANALYSIS)
    with pytest.raises(RuntimeError), analyses_answered_by(AccessCache().answer):
        raise RuntimeError
    assert getattr(triton_kernel_wrap, ANALYSIS) is before


@pytest.mark.gpu
def test_answers_are_torchs_own(monkeypatch):
    """For every kernel in a layer's forward and backward."""
    counted = {"asked": 0, "analysed": 0}
    answered = AccessCache.answer

    def answer_both(self, analyse, kernel, kwargs, descriptors):
        before = len(self._known)
        answer = answered(self, analyse, kernel, kwargs, descriptors)
        counted["asked"] += 1
        counted["analysed"] += len(self._known) - before
        assert access_key(kernel, kwargs, descriptors) is None or str(answer) == str(
            analyse(kernel, kwargs, descriptors)
        )
        return answer

    monkeypatch.setattr(ACCESSES, "_known", {})
    monkeypatch.setattr(AccessCache, "answer", answer_both)
    monkeypatch.setattr(torch.compiler.config, "force_disable_caches", True)  # a graph on disk is not analysed
    model = tunecompile.optimize(build("llama", "qlora"))
    zoo.step(model, zoo.batch(4099, 2, 256, "cuda"), torch.bfloat16)
    assert not find(model, "compiled-without-rewrites", *EAGER)
    assert 0 < counted["analysed"] <= 0.5 * counted["asked"], counted


def test_nothing_is_replaced_where_torch_keeps_the_results(asked, monkeypatch):
    monkeypatch.setattr(known_bugs, "TRITON_ANALYSIS_REPEATED", SimpleNamespace(present=False))
    before = getattr(triton_kernel_wrap, ANALYSIS)
    with analyses_answered_by(AccessCache().answer):
        assert getattr(triton_kernel_wrap, ANALYSIS) is before
