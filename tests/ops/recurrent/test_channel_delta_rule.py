"""The delta rule with a decay for each channel is the rule a token at a time, with its gradients, within documents."""

import sys

import pytest
import torch

from tests.support.ops.recurrent import (
    assert_documents_apart,
    assert_fakes_are_real,
    assert_finite_when_all_is_forgotten,
    assert_one_rounding,
    gradients,
    operands,
    recurrence,
)
from tunecompile.ops import channel_delta_rule, gated_delta_rule

CASES = {  # rows, tokens, heads, keys, values, an initial state, offsets, eps
    "a state to begin with": (2, 70, 3, 8, 6, True, None, 1e-6),
    "documents": (1, 150, 2, 6, 8, False, [0, 3, 64, 100, 101, 128, 150], 1e-6),
    "documents, blanks behind them": (1, 130, 1, 4, 4, False, [0, 10, 129], 0.0),
    "one token": (2, 1, 1, 4, 4, False, None, 1e-6),
}


def arguments(case, dtype=torch.float64):
    rows, tokens, heads, *sizes, offsets, eps = CASES[case]
    torch.manual_seed(0)
    offsets = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    return [*operands(rows, tokens, heads, heads, *sizes, dtype=dtype, channels=True), offsets, 0.3, eps]


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients(case, monkeypatch):
    op = sys.modules["tunecompile.ops.recurrent.channel_delta_rule"]
    monkeypatch.setattr(op, "AT_ONCE", 1)  # head by head
    args = arguments(case)
    exact, made = recurrence(*args), channel_delta_rule(*args)
    for got, by_definition in zip((*made, *gradients(made, args)), (*exact, *gradients(exact, args))):
        torch.testing.assert_close(got, by_definition, rtol=1e-11, atol=1e-11)


def test_alike_decays_are_one_decay():
    args = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments("documents")]
    one = args[3][..., :1]
    args[3] = one.expand_as(args[3])
    for got, expected in zip(channel_delta_rule(*args), gated_delta_rule(*args[:3], one[..., 0], *args[4:])):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_those_of_one_rounding(dtype):
    assert_one_rounding(channel_delta_rule, arguments("a state to begin with", dtype))


def test_a_document_knows_nothing_of_others():
    assert_documents_apart(channel_delta_rule, arguments("documents"), slice(64, 100))  # the third one


def test_forgetting_everything_overflows_nowhere():
    assert_finite_when_all_is_forgotten(channel_delta_rule, arguments("a state to begin with", torch.float32))


@pytest.mark.parametrize("case", ["a state to begin with", "documents"])
def test_fakes(case):
    assert_fakes_are_real(channel_delta_rule, arguments(case, torch.bfloat16))


def test_opcheck():
    torch.library.opcheck(channel_delta_rule.overload, tuple(arguments("one token", torch.float32)))
