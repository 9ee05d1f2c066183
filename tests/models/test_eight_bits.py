"""`optimize(model, precision=...)` in 8 bits: training goes as in bf16, only what was asked for changes, and the report says what did not."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.models.pairs import attending, small
from tests.support.notes import find, has
from tests.support.reports import flattened
from tunecompile.compiler.partitioner import Lowering
from tunecompile.compiler.pass_manager import Context
from tunecompile.errors import UnknownPrecision
from tunecompile.passes import PIPELINE

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
PRECISION = ("not-in-precision", "products-not-in-precision", "region-not-in-precision")


def tiny(quantized: bool = False, **options):
    model = attending().bfloat16()
    return zoo.adapt(zoo.quantize(model, torch.bfloat16) if quantized else model, **options)


def test_a_model_in_fp16_takes_what_gives_fp16():
    model = tunecompile.optimize(tiny().half(), precision="8bit", executor="eager")
    zoo.step(model, zoo.batch())
    report = tunecompile.report(model)
    assert report.regions[0].providers["lora_linear: int8"] == 2 and not find(model, *PRECISION), report


def test_rows_without_their_padding_also_in_a_budget():
    """What is frozen is in 8 bits whatever form a step has, and gradients point where those of bf16 point."""
    base, batch = zoo.adapt(small().bfloat16()), padded(rows=6, length=48)
    ours = tunecompile.optimize(copy.deepcopy(base), precision="fp8", memory="24MiB", executor="eager")
    for _ in range(2):
        (loss, got), (expected, wanted) = (zoo.step(model, batch, torch.bfloat16) for model in (ours, base))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-2) and loss != expected
        assert max(zoo.errors(got, wanted).values()) < 0.3
        for name, gradient in wanted.items():
            assert torch.cosine_similarity(got[name].flatten().double(), gradient.flatten().double(), dim=0) > 0.97
    report = tunecompile.report(ours)
    assert report.regions[0].providers["lora_linear: fp8"] == 4 and not find(ours, *PRECISION), report
    assert flattened(ours) == 2


def test_a_model_in_fp32_runs_as_it_is_and_the_report_says_why():
    model = zoo.adapt(attending())
    reference = copy.deepcopy(model)
    tunecompile.optimize(model, precision="fp8", executor="eager")
    (loss, _), (expected, _) = zoo.step(model, zoo.batch()), zoo.step(reference, zoo.batch())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert has(model, "not-in-precision", reason="fp8-gives-bfloat16", precision="fp8")
    assert has(model, "fp8-gives-bfloat16", detail="float32") and has(model, "region-not-in-precision")


@pytest.mark.slow
def test_linears_without_an_adapter_stay_as_they_are_and_are_counted():
    model = tunecompile.optimize(tiny(target_modules=["q_proj", "v_proj"]), precision="fp8", executor="eager")
    zoo.step(model, zoo.batch(), torch.bfloat16)
    report = tunecompile.report(model)
    assert report.regions[0].providers["lora_linear: fp8"] == 1  # q and v are siblings
    assert has(report, "products-not-in-precision", count=2), report


def test_a_trained_base_stays_as_it_is():
    model = tunecompile.optimize(attending().bfloat16(), precision="fp8", executor="eager")
    zoo.step(model, zoo.batch())
    assert has(model, "region-not-in-precision", precision="fp8")


@pytest.mark.parametrize("given", ["fp16", "FP8", 8, True])
def test_an_unknown_precision_is_refused(given):
    model = attending()
    with pytest.raises(UnknownPrecision, match="fp8"):
        tunecompile.optimize(model, precision=given)
    assert not hasattr(model, "_tunecompile")


def test_caches_tell_precisions_apart():
    uuids = {
        Lowering(PIPELINE, Context("r", precision=precision)).uuid() for precision in (None, "fp8", "int8", "8bit")
    }
    assert len(uuids) == 4
