"""How calls run. Pure functions decide: of a step, once, from what the owner of the layers is called with; of a layer's
call, from that.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Mode(enum.Enum):
    """How a call of a module that owns layers runs, and each of its layers."""

    EAGER = "eager"  #: by its own code
    TRAIN = "train"  #: compiled, with a backward pass
    SCORE = "score"  #: compiled, without gradients: a reference's log-probabilities, say
    EVALUATE = "evaluate"  #: the same in eval mode, for a loss

    @property
    def without_gradients(self) -> bool:
        """Whether it is compiled without a backward pass."""
        return self in (Mode.SCORE, Mode.EVALUATE)


@dataclass(frozen=True)
class StepFacts:
    """What is known of a call of the module that owns layers, as it begins."""

    training: bool  #: of the module
    gradients: bool
    traced: bool = False  #: whether others trace it: `torch.compile`, `torch.func`, forward-mode AD
    elsewhere: bool = False  #: whether another thread trains, whose call the layers hold
    scores: bool = False  #: whether its results are compared with those of training steps
    evaluates: bool = False  #: whether it is an evaluation that can be compiled


def mode_of_step(facts: StepFacts) -> Mode:
    """How a call of the owner runs."""
    if facts.traced:
        return Mode.EAGER
    if facts.gradients:
        return Mode.TRAIN if facts.training else Mode.EAGER
    if facts.elsewhere:
        return Mode.EAGER
    if facts.training:
        return Mode.SCORE if facts.scores else Mode.EAGER
    return Mode.EVALUATE if facts.evaluates else Mode.EAGER


def mode_of_layer(step: Mode, training: bool, gradients: bool) -> Mode:
    """How a layer's call runs in a forward pass.

    A frozen layer in eval mode trains with the others, and so does one without gradients: in the first run of a
    re-entrant checkpoint.

    Args:
        step: how its owner's call runs.
        training: of the layer.
        gradients: whether there are any now.
    """
    if step is Mode.SCORE and not training:
        return Mode.EAGER
    return Mode.EAGER if step.without_gradients and gradients else step


def mode_again(ran: Mode, training: bool, gradients: bool) -> Mode:
    """How a layer's call runs that a checkpoint repeats in a backward pass: as it ran.

    Args:
        ran: how it did.
        training: of the layer.
        gradients: whether there are any now.
    """
    return Mode.TRAIN if training and gradients and ran is not Mode.EAGER else Mode.EAGER
