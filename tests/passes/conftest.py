"""What tests of passes share: a provider, and which cases run through the whole backend."""

import pytest

from tests.support.passes.run import whole_backend
from tunecompile.ir.op import Provider
from tunecompile.ops import lora_mlp


@pytest.fixture(autouse=True)
def one_case_through_the_whole_backend(request):
    """Every case runs through the recognise passes, values and gradients compared. The first of a test is captured by
    Dynamo and also runs through AOTAutograd, plan and lowering, which takes most of the time; with the slow tests, all
    of them do. Others are captured without Dynamo where symbols tell what they do (tests/support/passes/captured.py)."""
    indices = request.node.callspec.indices.values() if hasattr(request.node, "callspec") else ()
    slow = request.node.get_closest_marker("slow") is not None
    everything = slow or "not slow" not in (request.config.getoption("markexpr") or "")
    token = whole_backend.set(everything or not any(indices))
    yield
    whole_backend.reset(token)


@pytest.fixture
def joined(monkeypatch):
    """A provider that supports everything: there is none on a CPU."""
    monkeypatch.setattr(
        lora_mlp, "providers", [Provider("test", lambda *args: lora_mlp.reference(*args), lambda *args: None)]
    )
