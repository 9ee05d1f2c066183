"""What a survey of a joint graph finds, when it ends, and what is left of one that fails."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tunecompile.compiler import survey as surveys
from tunecompile.compiler.survey import Surveys, survey
from tunecompile.planner.solver import KEEP, RECOMPUTE, Plan
from tunecompile.planner.step_plan import RegionCandidates

HALF = Plan(frozenset({0}))


def graph(fn=lambda x, w: (x @ w).sin()):
    return make_fx(fn, tracing_mode="fake")(torch.ones(8, 4), torch.ones(4, 4))


def joint(cut=lambda plan: (graph(), graph())):
    return SimpleNamespace(graph=graph().graph, cut=cut, attention=2.0, passed=96)


def ran(stages, enough=lambda found: False, **options):
    """(The result, how many plans there were each time that it was asked for enough.)"""
    asked = []
    result = survey(joint(), 7, stages, lambda found: asked.append(len(found.rows)) or enough(found), **options)
    return result, asked


def test_all_stages_are_tried_until_there_is_enough():
    result, asked = ran([[KEEP], [HALF, RECOMPUTE]])
    found = result.found
    assert asked == [1, 3] and result.error is None and found.whole
    assert [row.plan for row in found.rows] == [KEEP, HALF, RECOMPUTE]
    assert (found.tokens, found.names, found.weights, found.attention, found.passed) == (7, ("mm 8x4",), 0, 2.0, 96)
    result, asked = ran([[KEEP], [HALF, RECOMPUTE]], lambda found: True)
    assert asked == [1] and not result.found.whole and len(result.found.rows) == 1


def test_no_stage_and_a_failure():
    """What was found before a failure stays."""
    assert ran([]) == (surveys.SurveyResult(None), [])

    def cut(plan):
        if plan == HALF:
            raise ValueError("cannot be cut")
        return graph(), graph()

    result = survey(joint(cut), 7, [[KEEP], [HALF], [RECOMPUTE]], lambda found: False)
    assert str(result.error) == "cannot be cut" and [row.plan for row in result.found.rows] == [KEEP]
    assert not result.found.whole
    assert survey(joint(cut), 7, [[HALF]], lambda found: False).found is None


@pytest.mark.parametrize("keeps", [True, False])
def test_bytes_of_matrices_count_where_weights_may_stay(monkeypatch, keeps):
    monkeypatch.setattr(surveys, "matrix_bytes", lambda graph: 4096)
    assert ran([[KEEP]], keeps_weights=keeps)[0].found.weights == (4096 if keeps else 0)


@pytest.mark.parametrize("helps", [True, False])
def test_a_survey_that_fails_is_tried_without_guests(monkeypatch, helps):
    """And it is said where that does not help. The layer runs as it would have, whichever it is."""

    def fails(gm, inputs):
        raise ValueError("planted")

    tried = []
    backend = surveys.SurveyBackend("layer", (), "eager", None, None, lambda gm: (gm, "runs"))
    monkeypatch.setattr(backend, "_trace", fails)
    monkeypatch.setattr(surveys, "without_packages", lambda *given: tried.append(given[:3]) or helps or None)
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    assert backend(graph, []) == (graph, "runs")
    ((region, guests, error),) = tried
    assert (region, guests, str(error)) == ("layer", (), "planted")
    assert [(note.code, note.subject) for note in backend.failures] == [("compiled-without-rewrites", "layer")] * (
        not helps
    )


def test_a_layer_that_attends_in_any_of_its_graphs(monkeypatch):
    """Its kernels are timed before it is surveyed."""
    backend = surveys.SurveyBackend("layer", (), "eager", None, None, lambda gm: gm)
    monkeypatch.setattr(backend, "_trace", lambda gm, inputs: None)
    assert not backend.attends and not backend.seen
    plain = torch.fx.symbolic_trace(torch.nn.Identity())
    attention = torch.fx.symbolic_trace(lambda x: F.scaled_dot_product_attention(x, x, x))
    for graph, attends in ((plain, False), (attention, True), (plain, True)):
        backend(graph, [])
        assert backend.attends is attends and not backend.failures


def test_which_regions_are_surveyed_again():
    """A region with candidates is not; once it is reopened, calls that showed a graph are made again."""
    seen = Surveys({1: RegionCandidates((), 8), 2: RegionCandidates((), 8)})
    seen.called = {(1, "train"): True, (1, "other"): False, (2, "train"): True}
    assert [seen.needs(region) for region in (1, 2, 3)] == [False, False, True]
    seen.reopen({1})
    assert [seen.needs(region) for region in (1, 2, 3)] == [True, False, True]
    assert seen.called == {(1, "other"): False, (2, "train"): True}
    seen.reopen({2})
    assert seen.reopened == {1, 2} and seen.called == {(1, "other"): False}
