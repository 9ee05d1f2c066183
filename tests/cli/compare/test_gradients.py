"""The gradient check: right ones pass, and every kind of wrong one is seen."""

import pytest
import torch

from tunecompile.verification.tolerance import ORDER, compare_gradients, judge_gradients, judge_loss, relative_error


@pytest.fixture
def exact():
    torch.manual_seed(0)
    return {f"layers.{i}.lora_A.weight": torch.randn(16, 32, dtype=torch.float64) for i in range(8)}


def noisy(exact, size, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: g + size * g.norm() * torch.randn(g.shape, generator=generator, dtype=g.dtype) / g.numel() ** 0.5
        for name, g in exact.items()
    }


def verdicts(exact, eager, system):
    return [v.passed for v in judge_gradients(compare_gradients(exact, eager, system, torch.float32))]


def test_a_more_exact_system_passes(exact):
    assert verdicts(exact, noisy(exact, 1e-4, 1), noisy(exact, 5e-5, 2)) == [True, True, True]


def test_a_less_exact_system_fails_by_its_median(exact):
    assert verdicts(exact, noisy(exact, 1e-4, 1), noisy(exact, 1.1e-4, 2)) == [False, True, True]


@pytest.mark.parametrize(
    "wrong", [lambda g: g * 1.001, lambda g: -g, lambda g: g.roll(1, 0), lambda g: g * float("nan")]
)
def test_one_planted_wrong_gradient_is_seen(exact, wrong):
    system = noisy(exact, 5e-5, 2)
    system["layers.3.lora_A.weight"] = wrong(system["layers.3.lora_A.weight"])
    rows = compare_gradients(exact, noisy(exact, 1e-4, 1), system, torch.float32)
    verdict = judge_gradients(rows)[1]
    assert not verdict.passed and "layers.3" in verdict.detail


def test_a_missing_and_a_zero_gradient_are_seen(exact):
    system = noisy(exact, 5e-5, 2)
    system["layers.3.lora_A.weight"] = None
    system["layers.4.lora_A.weight"] = torch.zeros(16, 32)
    rows = compare_gradients(exact, noisy(exact, 1e-4, 1), system, torch.float32)
    assert [r["parameter"] for r in rows if not r["has_gradient"]] == [
        "layers.3.lora_A.weight",
        "layers.4.lora_A.weight",
    ]
    assert [v.passed for v in judge_gradients(rows)] == [True, False, False]


def test_eagers_own_error_is_floored_where_eager_is_exact(exact):
    rows = compare_gradients(exact, exact, noisy(exact, 0.5 * ORDER, 1), torch.float32)
    assert all(r["eager_error"] == 0 and r["yardstick"] == ORDER for r in rows) and all(
        v.passed for v in judge_gradients(rows)
    )
    assert not judge_gradients(compare_gradients(exact, exact, noisy(exact, 2 * ORDER, 1), torch.float32))[0].passed
    rows = compare_gradients(exact, exact, exact, torch.bfloat16)
    assert rows[0]["yardstick"] == torch.finfo(torch.bfloat16).eps


def test_a_gradient_that_is_nearly_zero_is_measured_against_the_floor():
    assert relative_error(torch.full((4,), 1e-9), torch.zeros(4), floor=1e-6) == pytest.approx(2e-3)
    assert relative_error(None, torch.ones(4), floor=1e-6) == 1.0


def test_loss_is_judged_over_the_steps_of_the_reference():
    assert judge_loss([3.0, 2.0], [3.1, 2.1, 9.9], [2.95, 2.05, 0.0]).passed
    assert not judge_loss([3.0, 2.0], [3.01, 2.01], [3.1, 2.1]).passed


def test_a_loss_that_wanders_is_told_from_one_that_is_wrong():
    reference, eager = [3.0, 2.9, 2.8, 2.7], [3.001, 2.899, 2.8005, 2.6985]
    assert judge_loss(reference, eager, [2.9995, 2.902, 2.7993, 2.699]).passed, (
        "farther in the mean, nearer in half of the steps"
    )
    assert not judge_loss(reference, eager, [3.0013, 2.9013, 2.8009, 2.7019]).passed, (
        "farther by a little at every step"
    )
    assert not judge_loss(reference, eager, [3.1, 2.9, 2.8, 2.7]).passed, "wrong at one step"
