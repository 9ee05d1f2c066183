"""The gated delta rule in chunks is the rule a token at a time, with its gradients, whatever documents stand in a row."""

import pytest
import torch

from tests.support.ops.checks import assert_fake_is_real
from tests.support.ops.recurrent import (
    assert_documents_apart,
    assert_fakes_are_real,
    assert_finite_when_all_is_forgotten,
    assert_one_rounding,
    gradients,
    operands,
    recurrence,
)
from tunecompile.ops import gated_delta_rule, ssd_scan

CASES = {  # rows, tokens, heads of q and k, heads, keys, values, an initial state, offsets, eps
    "shared heads, a state to begin with": (2, 70, 2, 4, 8, 6, True, None, 1e-6),
    "documents": (1, 150, 2, 2, 6, 8, False, [0, 3, 64, 100, 101, 128, 150], 1e-6),
    "documents, blanks behind them": (1, 130, 1, 2, 4, 4, False, [0, 10, 129], 0.0),
    "one token": (2, 1, 1, 1, 4, 4, False, None, 1e-6),
    "whole chunks": (1, 128, 1, 1, 4, 4, True, None, 0.0),
}


def arguments(case, dtype=torch.float64):
    *sizes, offsets, eps = CASES[case]
    torch.manual_seed(0)
    offsets = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    return [*operands(*sizes, dtype=dtype), offsets, 0.3, eps]


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients(case):
    args = arguments(case)
    exact, made = recurrence(*args), gated_delta_rule(*args)
    for got, by_definition in zip((*made, *gradients(made, args)), (*exact, *gradients(exact, args))):
        torch.testing.assert_close(got, by_definition, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", ["shared heads, a state to begin with", "documents"])
def test_without_the_delta_it_is_a_state_space(case):
    *args, offsets, _, _ = arguments(case)
    exact, made = recurrence(*args, offsets, 1.0, 0.0, delta=False), ssd_scan(*args, offsets)
    for got, by_definition in zip((*made, *gradients(made, args)), (*exact, *gradients(exact, args))):
        torch.testing.assert_close(got, by_definition, rtol=1e-11, atol=1e-11)
    args = [x if x is None else x.detach() for x in args]
    assert_fake_is_real(ssd_scan, *args, offsets)
    assert_fake_is_real(ssd_scan.backward_op, *(x.detach() for x in made), *args, offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_those_of_one_rounding(dtype):
    assert_one_rounding(gated_delta_rule, arguments("shared heads, a state to begin with", dtype))


def test_a_document_knows_nothing_of_others():
    assert_documents_apart(gated_delta_rule, arguments("documents"), slice(64, 100))  # the third one


def test_forgetting_everything_overflows_nowhere():
    assert_finite_when_all_is_forgotten(gated_delta_rule, arguments("whole chunks", torch.float32))


@pytest.mark.parametrize("case", ["shared heads, a state to begin with", "documents"])
def test_fakes(case):
    assert_fakes_are_real(gated_delta_rule, arguments(case, torch.bfloat16))


def test_opcheck():
    torch.library.opcheck(gated_delta_rule.overload, tuple(arguments("one token", torch.float32)))
