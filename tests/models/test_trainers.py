"""TRL's trainer gives the curve that it gives without `optimize` (others: tests/support/matrix/trainers.py)."""

import pytest

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import pair, small
from tests.support.notes import fell_back
from tests.support.trainers import curve, sft

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.gpu
def test_trl_offloads_activations(tmp_path):
    """TRL copies to the host what layers save; it wants a GPU."""
    model, reference = pair(lambda: zoo.adapt(small(), target_modules=["q_proj", "down_proj"]).cuda())
    options = {"use_cpu": False, "activation_offloading": True}
    curves = [curve(sft(m, tmp_path, **options)) for m in (model, reference)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert not fell_back(model), tunecompile.report(model)
