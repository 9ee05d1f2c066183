"""The one reader of what stands between a head and its loss, by steps as graphs and recorded calls spell them."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile.ir.logit_chain import CALLS, Step, Unfit, calls, read, spelled

WIDTH, WORDS = 3, 5
HIDDEN, HEAD = torch.randn(2, 4, WIDTH), torch.randn(WORDS, WIDTH)


def chain_of(*given):
    """The chain of calls on logits, (call, arguments), and what they make of the logits."""
    logits, steps = HIDDEN @ HEAD.t(), []
    for call, *args in given:
        logits = getattr(logits, call)(*args) if isinstance(call, str) else call(logits, *args)
        steps.append(Step(call, logits.to("meta"), tuple(args)))
    return read(torch.empty(2, 4, WORDS, device="meta"), steps), logits


@pytest.mark.parametrize(
    "given",
    [
        [(Tensor.__getitem__, 1)],
        [("view", 8, WORDS), (operator.getitem, slice(3, None))],
        [(torch.flatten, 0, 1), ("view", 4, 2, WORDS), (operator.getitem, (slice(None), 1)), (torch.unsqueeze, 1)],
        [(operator.mul, 3.0), (torch.tanh,), (Tensor.div, 2.0), ("mul", 5.0)],
        [("clone",), ("double",), (operator.getitem, (Ellipsis, slice(1, 3), slice(None))), (torch.mul, 0.5)],
        [(Tensor.mul_, 2.0), (Tensor.div_, 0.5)],
        [
            (operator.getitem, (slice(1, None), slice(None), slice(None))),
            ("mul", -0.5),
            (operator.getitem, (0, slice(2))),
        ],
    ],
)
def test_the_chain_computes_what_the_steps_do(given):
    chain, logits = chain_of(*given)
    made = chain.rows_of(HIDDEN, WIDTH) @ HEAD.t() * chain.scale
    made = torch.tanh(made / chain.softcap) * chain.softcap if chain.softcap else made
    torch.testing.assert_close(made.to(logits.dtype), logits.reshape(-1, WORDS))


@pytest.mark.parametrize(
    "given, why",
    [
        ([("tanh",), ("mul", 2.0), ("tanh",)], "two-tanh"),
        ([("tanh",), ("mul", -1.0)], "softcap-not-positive"),
        ([("tanh",), ("mul", 0.0), ("mul", 2.0)], "softcap-not-positive"),
        ([("div", 0.0)], "scale-not-constant"),
        ([("mul", torch.ones(()))], "scale-not-constant"),
        ([(torch.log_softmax, -1), ("tanh",)], "log-probs-changed"),
        ([(torch.log_softmax, -1), ("mul", 2.0)], "log-probs-changed"),
        ([("view", 2, 4 * WORDS)], "vocabulary-reshaped"),
        ([(operator.getitem, (slice(None), [0, 1]))], "slice-not-understood"),
        ([(operator.getitem, (Ellipsis, slice(2)))], "slice-not-understood"),
        ([(operator.getitem, None)], "slice-not-understood"),
        ([("to", torch.int64), ("to", torch.float32)], "logits-of-another-kind"),
        ([("view", torch.int32), ("view", torch.float32)], "logits-of-another-kind"),
        ([("half",), ("view", torch.bfloat16)], "logits-of-another-kind"),
    ],
)
def test_why_steps_are_no_chain(given, why):
    with pytest.raises(Unfit) as told:
        chain_of(*given)
    assert told.value.reason.code == why


def test_logits_that_move_are_no_chain():
    """The labels are where they went."""
    here = torch.empty(2, 4, WORDS)
    with pytest.raises(Unfit) as told:
        read(here, [Step("to", here.to("meta"), ("meta",))])
    assert told.value.reason.code == "logits-of-another-kind"


def test_every_spelling_of_an_operation_is_one_kind():
    assert {CALLS[call] for call in ("mul", torch.mul, Tensor.mul, Tensor.__rmul__, operator.mul)} == {"multiply"}
    assert {"flatten", torch.flatten, Tensor.squeeze} <= set(calls("reshape")) and operator.getitem in calls("slice")
    assert {F.log_softmax, torch.special.log_softmax} <= set(spelled("log_softmax"))
    assert torch.float not in CALLS and Tensor.mul_ not in CALLS
