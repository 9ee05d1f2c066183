"""Tests run on the machine's own devices; those marked `gpu` are skipped where there is none."""

import contextlib
import gc
import itertools
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # a fiftieth of the time, and each test has few objects
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")  # six tries of g++ for what few kernels may use
os.environ.pop("TUNECOMPILE", None)

pytest.register_assert_rewrite("tests.support")
MODULES = itertools.count(1)  #: that a process has run tests of


def has_gpu() -> bool:
    """torch comes late: the process that only hands tests to others does without it."""
    import torch

    return torch.cuda.is_available()


# Without a GPU templates run in Triton's interpreter, which changes every kernel of the process, other packages' too. So they have a
# process of their own: test_templates.py starts it, and so does naming them on the command line.
if any("templates" in Path(argument.partition("::")[0]).parts for argument in sys.argv[1:]) and not has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton.jit runs, so before any import of triton


def pytest_ignore_collect(collection_path):
    if collection_path == Path(__file__).with_name("templates") and os.environ.get("TRITON_INTERPRET") != "1":
        return None if has_gpu() else True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session):
    """Nothing of what is imported is garbage: looking for it takes a sixth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_addoption(parser):
    parser.addoption(
        "--durations-to", metavar="FILE", type=Path, help="write where the time of the tests goes, as JSON"
    )


def pytest_configure(config):
    if path := config.getoption("durations_to"):
        from tests.support.durations import Durations

        config.pluginmanager.register(Durations(path.absolute()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    from tests.support.compiling import without_profiles, without_traces

    without_profiles()
    without_traces()
    if unnamed := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"no two processes call it the same, give the case a name: {unnamed[0]}")
    items.sort(key=longest_first)
    if has_gpu():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


#: tests that compile whole models on a GPU, or start processes, those of most graphs first
LONG = (
    "tests/test_templates.py",
    "models/test_gpu_hybrids.py",
    "models/test_gpu_experts.py::test_a",
    "distributed/test_ranks.py",
    "models/test_gpu_small_cards.py",
    "unpad/test_gpu_unpad.py::test_no_further",
    "models/test_gpu.py",
    "models/test_gpu_eight_bits.py",
    "models/test_gpu_tiling.py::test_a_model",
    "models/test_gpu_attention.py",
    "memory/test_gpu_offload.py::test_compiled",
    "memory/test_gpu_weight",
    "memory/test_gpu_long.py",
    "cuda_graphs/test_gpu_replay.py",
    "estimate/test_estimate.py",
    "models/test_trainers.py",
)


def longest_first(item) -> int:
    """So that no process begins a long one at the end, while others have none: `--maxschedchunk 1` with 12 of them."""
    return next((place for place, name in enumerate(LONG) if name in item.nodeid), len(LONG))


def pytest_collection_finish(session):
    """Modules and test items are there to stay, and tracing makes many objects: the collector goes over new ones alone."""
    leave_to_stay()
    gc.set_threshold(50_000, 20, 100)


def leave_to_stay() -> None:
    """What is alive now, the collector no longer looks at."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # some packages look for what is left when the process ends


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """`gc.collect` in a test takes 0.7 s once thousands have filled the caches of torch and sympy: these are left to stay."""
    yield
    if not next(MODULES) % 5:
        leave_to_stay()


@pytest.fixture(autouse=True)
def fresh_compiler(request):
    """No test sees another one's Dynamo caches or random state, or graphs of code that it replaced. Those of a module
    marked `shared_graphs` have its fixtures' models in common, and what these are compiled to."""
    import torch

    reset = torch._dynamo.reset if request.node.get_closest_marker("shared_graphs") is None else bool
    reset()
    torch.manual_seed(0)
    with own_graphs() if "monkeypatch" in request.fixturenames else contextlib.nullcontext():
        yield
    reset()


@pytest.fixture(autouse=True)
def own_environment():
    """What a test leaves in the environment is gone behind it, also what a package left there: processes that later
    tests start would have it. PEFT leaves CXX=gcc where BOFT's extension does not build, and Inductor's C++ linked by
    that does not load.
    """
    before = dict(os.environ)
    yield
    for name in {*before, *os.environ} - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@contextlib.contextmanager
def own_graphs():
    """Inside, nothing is known of earlier compilations, and what is found out is forgotten behind it."""
    from tunecompile.ir.shape_rule_cache import ProcessCache

    known = [(cache, dict(cache)) for cache in ProcessCache.instances]
    for cache, _ in known:
        cache.clear()
    yield
    for cache, entries in known:
        cache.clear()
        cache.update(entries)


@pytest.fixture
def to_the_host(monkeypatch):
    """Copies to the host cost nothing and products much: whatever does not fit is offloaded."""
    from tests.support.memory.copy_engine import HostCopyEngine
    from tunecompile.planner.hardware import Rates
    from tunecompile.runtime.memory import per_device, plan_maker
    from tunecompile.runtime.memory.offload import Offload

    made = []

    def offload(_state, device, _devices):
        made.append(Offload(device, 1 << 28, smallest=1, copier=HostCopyEngine()))
        return made[-1]

    monkeypatch.setattr(per_device, "_offload", offload)
    monkeypatch.setattr(plan_maker, "rates_of", lambda *_: Rates(flops=1.0, copy=1e12))
    return made


@pytest.fixture
def made(monkeypatch):
    """How often a head computed logits as a whole."""
    from tunecompile.runtime.loss_head import Head

    calls, whole = [], Head.logits
    monkeypatch.setattr(Head, "logits", lambda self, *args: calls.append(self) or whole(self, *args))
    return calls
