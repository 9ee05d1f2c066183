"""Losses of preferences and rewards by TRL's own functions and trainers: the same curves as without `optimize`, and no logits but for metrics."""

import pytest

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_same_run
from tests.support.matrix import trainers
from tests.support.matrix.follow import follow_run
from tests.support.matrix.losses import dpo, grpo
from tests.support.matrix.runs import adapted
from tests.support.models.pairs import pair
from tests.support.notes import fell_back
from tests.support.reports import head_tally

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("loss", [dpo, grpo])
def test_by_trls_functions(loss, made):
    model, reference = pair(adapted)
    assert_same_run(model, reference, lambda m: loss(m, zoo.batch(rows=4)))
    assert head_tally(model).rewritten == 1 and len(made) == (loss is grpo)


@pytest.mark.parametrize("kind", ["DPO", "ORPO"])
@pytest.mark.slow
def test_trainers(kind, tmp_path):
    model = follow_run(next(cell for cell in trainers.CELLS if cell.name == kind), tmp_path)
    assert head_tally(model).rewritten == 1, tunecompile.report(model)
    assert not fell_back(model)
