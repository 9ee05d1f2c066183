"""Losses of preferences and rewards by TRL's own functions and trainers: the same curves as without `optimize`, and no logits but for metrics."""

import functools
import importlib

import pytest

import tunecompile
from tests.models import support_trainers
from tests.models.support_losses import dpo, grpo
from tests.models.support_trainers import adapted
from tests.models.test_support import follow_run
from tests.runtime.loss_head.test_log_probs import made, tally  # noqa: F401: a fixture
from tests.runtime.test_loops import equal, fell_back, pair
from tests.support import zoo

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "loss", [dpo, grpo, functools.partial(grpo, entropy=False)], ids=["dpo", "grpo", "grpo without entropy"]
)
def test_by_trls_functions(loss, made):  # noqa: F811
    model, reference = pair(adapted)
    equal(model, reference, lambda m: loss(m, zoo.batch(rows=4)))
    assert tally(model).rewritten == 1 and len(made) == (loss is grpo)


@pytest.mark.parametrize("kind", ["DPO", "ORPO"])
@pytest.mark.slow
def test_trainers(kind, tmp_path):
    model = follow_run(next(cell for cell in support_trainers.CELLS if cell.name == kind), tmp_path)
    fused = kind == "DPO" and hasattr(importlib.import_module("trl.trainer.utils"), "add_fused_lm_head")  # TRL's own
    assert tally(model).rewritten == (0 if fused else 1), tunecompile.report(model)
    assert not fell_back(model)
