"""Every family against variants of its graph that are made, not listed: those that say the same are found, and no near miss is taken for it."""

import pytest
import torch

from tests.support.passes.run import family
from tests.support.planted import SUBJECTS
from tunecompile.verification.nets import near_misses, respelled, spellings, spoilt, through
from tunecompile.verification.pass_examples import Example

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = {of: subject for of, subject in SUBJECTS.items() if subject.passes}


def answers(net, subject):
    torch.manual_seed(0)
    return list(net(family(*subject.passes), Example(subject.spelled, subject.args)))


@pytest.mark.parametrize("of", FAMILIES)
def test_other_spellings_are_found(of):
    for asked, passed, detail in answers(spellings, FAMILIES[of]):
        assert passed, f"{asked}: {detail}"


@pytest.mark.parametrize("of", FAMILIES)
def test_near_misses_stay_right(of):
    ((asked, passed, detail),) = answers(near_misses, FAMILIES[of])
    assert passed, f"{asked}: {detail}"
    assert int(asked.split()[0]) >= 4  # of a single call: its constant, negated, rolled, read elsewhere


def test_variants_are_what_they_say():
    graphs = []
    through(lambda x, y: torch.tanh(x - y) * 2.0, lambda gm: graphs.append(gm) or gm)(
        torch.randn(3, 4), torch.randn(3, 4)
    )
    assert [what for what, _ in respelled(graphs[0])] == [
        "sub cast to its own dtype",
        "tanh cast to its own dtype",
        "operands of mul swapped",
        "mul cast to its own dtype",
    ]
    whats = [what for what, _ in spoilt(graphs[0])]
    assert "operands of sub swapped" in whats and "2.0 of mul is 3.25" in whats and len(whats) == 11
