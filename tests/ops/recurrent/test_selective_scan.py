"""Mamba-1's scan is its recurrence a token at a time, with its gradients, within documents."""

import sys

import pytest
import torch

from tests.support.ops.checks import assert_fake_is_real, error
from tests.support.ops.recurrent import gradients, selective_operands, selective_recurrence
from tunecompile.ops import selective_scan

CASES = {  # rows, tokens, channels, states, an initial state, offsets
    "a state to begin with": (2, 70, 5, 4, True, None),
    "documents": (1, 150, 3, 4, False, [0, 3, 64, 100, 101, 128, 150]),
    "blanks behind documents": (1, 130, 2, 3, False, [0, 10, 129]),
    "one token": (2, 1, 3, 2, True, None),
}


def arguments(case, dtype=torch.float64):
    *sizes, initial, offsets = CASES[case]
    torch.manual_seed(0)
    return [
        *selective_operands(*sizes, initial, dtype),
        None if offsets is None else torch.tensor(offsets, dtype=torch.int32),
    ]


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients(case, monkeypatch):
    op = sys.modules["tunecompile.ops.recurrent.selective_scan"]
    monkeypatch.setattr(op, "AT_ONCE", 1)  # channel by channel
    args = arguments(case)
    exact, made = selective_recurrence(*args), selective_scan(*args)
    for got, by_definition in zip((*made, *gradients(made, args)), (*exact, *gradients(exact, args))):
        torch.testing.assert_close(got, by_definition, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_those_of_one_rounding(dtype):
    args = arguments("a state to begin with", dtype)
    wide = [x.detach().double().requires_grad_() if isinstance(x, torch.Tensor) else x for x in args]
    exact, made = selective_recurrence(*wide), selective_scan(*args)
    assert made[0].dtype == dtype and made[1].dtype == torch.float32
    found = [error(x, y) for x, y in zip((*made, *gradients(made, args)), (*exact, *gradients(exact, wide)))]
    assert max(found) < 20 * torch.finfo(dtype).eps, found


def test_a_document_knows_nothing_of_others():
    args = arguments("documents")
    changed = [args[0].detach().clone(), *args[1:]]
    changed[0][:, 64:100] = torch.randn_like(changed[0][:, 64:100])
    difference = (selective_scan(*args)[0] - selective_scan(*changed)[0]).detach().abs().amax((0, 2))
    assert difference[64:100].min() > 1e-3
    assert difference[:64].max() < 1e-13 and difference[100:].max() < 1e-13


@pytest.mark.parametrize("case", ["a state to begin with", "documents"])
def test_fakes(case):
    args = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments(case, torch.bfloat16)]
    assert_fake_is_real(selective_scan, *args)
    grad, final = (torch.randn_like(x) for x in selective_scan(*args))
    assert_fake_is_real(selective_scan.backward_op, grad, final, *args)


@pytest.mark.slow
def test_opcheck():
    torch.library.opcheck(selective_scan.overload, tuple(arguments("one token", torch.float32)))
