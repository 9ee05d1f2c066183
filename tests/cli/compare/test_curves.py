"""Distances of loss curves, and what of them is noise."""

import pytest

from tunecompile.cli.compare.curves import base_of, batch_noise, compare_curves, judge_curves

BF16 = [3.0, 2.8, 2.9, 2.6, 2.7, 2.4]


def run(system, losses, shape="4x64", status="ok"):
    return {"system": system, "shape": shape, "status": status, **({"losses": losses} if status == "ok" else {})}


def test_noise_is_what_another_batch_does():
    assert batch_noise([1.0, 1.2, 1.0, 1.2]) == pytest.approx(0.2 / 2**0.5)
    assert batch_noise([1.0]) == 0


def test_curves_are_held_against_eagers_else_against_tunecompiles():
    runs = [
        run("hf", None, status="oom"),
        run("liger", BF16),
        run("tunecompile", BF16),
        run("tunecompile-fp8", [v + 0.01 for v in BF16]),
        run("tunecompile-fp8", BF16, shape="2x8"),
    ]
    assert base_of(runs)["system"] == "tunecompile"
    rows = compare_curves(runs)
    assert [r["system"] for r in rows] == ["liger", "tunecompile-fp8"]
    assert rows[0]["largest"] == 0 and rows[1]["mean"] == rows[1]["mean_size"] == pytest.approx(0.01)
    assert base_of([run("liger", BF16)]) is None and compare_curves([run("liger", BF16)]) == []


def test_only_a_reduced_precision_is_judged_and_by_the_curves_own_noise():
    near, far = ([v + distance for v in BF16] for distance in (0.02, 0.3))
    (verdict,) = judge_curves([run("hf", BF16), run("tunecompile", near), run("tunecompile-fp8", near)])
    assert verdict.passed and "tunecompile's 2.0e-02" in verdict.detail
    assert not judge_curves([run("hf", BF16), run("tunecompile-fp8", far)])[0].passed
    assert judge_curves([run("hf", BF16), run("tunecompile", far)]) == []
