"""Heads of 512, which vendors' fast kernels do not take, compiled for real in lengths that change, and recorded."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.gpu import against_fp32, median
from tests.support.notes import EAGER, find
from tunecompile.compiler import attention_backend
from tunecompile.compiler.attention_backend import BLOCKS
from tunecompile.runtime.model_state import state_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def wide():
    changes = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "num_hidden_layers": 2}
    model = zoo.make("gemma4", **changes, global_head_dim=512, use_cache=False).to("cuda", torch.bfloat16)
    return zoo.adapt(model, r=8)


@pytest.fixture
def always(monkeypatch):
    """Blocks are taken, which few heads of a short row would not be: as if they had been measured to be faster."""
    monkeypatch.setattr(attention_backend, "time_on_gpu", lambda call, name, device: 1.0 if name == BLOCKS else 2.0)
    monkeypatch.setattr(attention_backend.tuning_cache, "read", lambda *key: None)
    monkeypatch.setattr(attention_backend.tuning_cache, "keep", lambda kind, key, times, sound: times)


def test_no_further_from_fp32_than_eager(always):
    """The same shape again and again is replayed at last; scores of the longest come in two blocks."""
    model = wide()
    eager, reference = copy.deepcopy(model), zoo.in_fp32(model)
    tunecompile.optimize(model)
    shapes = [(2, 1536), (2, 1536), (3, 200), (2, 1536), (1, 1100), (2, 1536), (2, 1536)]
    batches = [zoo.batch(256, *shape, "cuda", seed=seed) for seed, shape in enumerate(shapes)]
    ours, theirs = against_fp32(reference, (model, eager), batches)
    assert median(ours.values()) <= 1.02 * median(theirs.values())
    assert max(ours[name] / theirs[name] for name in ours) < 1.25, (ours, theirs)
    report = tunecompile.report(model)
    contexts = [
        made for region in state_of(model).regions for each in region.backends.values() for made in each.contexts
    ]
    in_blocks = sum(made.providers.get("causal_attention: blocks", 0) for made in contexts)
    assert in_blocks >= 2, report  # of the first shape, and of others
    assert not find(model, *EAGER), report
    assert any(BLOCKS in str(each) for each in report.notes), report
    assert report.compiles <= 4, report
