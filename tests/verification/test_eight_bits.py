"""Verification of a model in 8 bits: its own rounding is no fault, and wrong scales are."""

import types
import warnings
from pathlib import Path

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import attending, small
from tests.support.notes import find
from tunecompile.ops import eight_bits
from tunecompile.ops.eight_bits import FP8, INT8
from tunecompile.verification import verify

pytest.importorskip("transformers")
SOURCE = Path(eight_bits.__file__).read_text()
FAULTS = [  # of a format, a line of its source and what stands there in its place
    (FP8, "* row_scales * column_scales).bfloat16()", "* row_scales).bfloat16()"),
    (FP8, "* row_scales * column_scales).bfloat16()", "* row_scales.roll(1, 0) * column_scales).bfloat16()"),
    (
        FP8,
        "_fp8_weight(weight, adapter, transposed)\n",
        "_fp8_weight(weight, None if transposed else adapter, transposed)\n",
    ),
    (FP8, "largest.clamp_min(TINY) / LARGEST\n    parts", "(largest / 4).clamp_min(TINY) / LARGEST\n    parts"),
    (INT8, "scales if transposed else None)", "None)"),
    (INT8, "None if transposed else scales\n", "None if transposed else scales.roll(1)\n"),
    (INT8, "_integer_product(rows, columns) * row_scales", "_integer_product(rows, columns) * row_scales.mean()"),
    (
        INT8,
        "weight.row_bounds().clamp_min(TINY) / INTEGERS",
        "weight.row_bounds().mean() * torch.ones(weight.height) / 12",
    ),
]


def verified(eight, dtype=torch.bfloat16, quantise=False, make=attending):
    made = make().to(dtype)
    model = zoo.adapt(zoo.quantize(made, dtype) if quantise else made)
    tunecompile.optimize(model, precision=eight.name, executor="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tunecompile.verify(model, zoo.batch())


@pytest.mark.parametrize(
    "eight, dtype, quantise",
    [(FP8, torch.bfloat16, False), (INT8, torch.bfloat16, True)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_rounding_on_purpose_is_no_fault(eight, dtype, quantise):
    if quantise:
        pytest.importorskip("bitsandbytes")
    result = verified(eight, dtype, quantise)
    assert result.passed and not result.faults, result
    assert find(result.notes, "judged-in-8-bits")


@pytest.mark.parametrize(
    "at, searched",
    [
        *(pytest.param(at, False, marks=[pytest.mark.slow] * (at % 4 > 0)) for at in range(len(FAULTS))),
        pytest.param(0, True, marks=pytest.mark.slow),
    ],
)
def test_wrong_scales_are_found(at, searched, monkeypatch):
    """searched: and switched off, which takes a compilation for each of eight trials."""
    eight, old, new = FAULTS[at]
    assert SOURCE.count(old) == 1, f"{old!r} stands {SOURCE.count(old)} times"
    planted = types.ModuleType("planted_eight_bits")
    monkeypatch.setitem(__import__("sys").modules, planted.__name__, planted)
    exec(compile(SOURCE.replace(old, new), "eight_bits.py", "exec"), vars(planted))
    right = eight.product
    if not searched:
        monkeypatch.setattr(verify, "_switch_off", lambda *_: [{"rewrite": "lora, not looked for"}])
    object.__setattr__(eight, "product", getattr(planted, eight.name.upper()).product)
    try:
        result = verified(eight, make=small if at % 4 else attending)
    finally:
        object.__setattr__(eight, "product", right)
    assert not result.passed and result.faults[0]["rewrite"].startswith("lora"), result
