"""Providers that tests of passes share."""

import pytest

from tunecompile.ir.op import Provider
from tunecompile.ops import lora_mlp


@pytest.fixture
def joined(monkeypatch):
    """A provider that supports everything: there is none on a CPU."""
    monkeypatch.setattr(
        lora_mlp, "providers", [Provider("test", lambda *args: lora_mlp.reference(*args), lambda *args: None)]
    )
