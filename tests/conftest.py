"""Tests run on the machine's own devices; those marked `gpu` are skipped where there is none."""

import os
import sys

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("TUNECOMPILE", None)

import torch  # noqa: E402

# Without a GPU templates run in Triton's interpreter, which changes every kernel of the process, other packages' too. So they have a
# process of their own: test_templates.py starts it, and so does naming them on the command line.
if not torch.cuda.is_available() and any("templates" in argument for argument in sys.argv[1:]):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton.jit runs, so before any import of triton
collect_ignore = [] if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1" else ["templates"]


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """No test sees another one's Dynamo caches or random state."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
