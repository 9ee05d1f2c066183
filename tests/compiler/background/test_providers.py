"""Ops have the same providers in the process that generates code as in the training."""

from dataclasses import replace

import pytest
import torch
from torch.fx import Graph

from tunecompile.compiler.background.providers import agree, foreign_modules, providers_now, run_by_provider
from tunecompile.ir.op import Cost, op
from tunecompile.ops.attention import varlen_attention
from tunecompile.ops.swiglu import gated_activation


@pytest.fixture(autouse=True)
def providers_stay():
    """As the process had them."""
    before = list(varlen_attention.providers)
    yield
    varlen_attention.providers[:] = before


def test_what_failed_a_trial_is_not_used_there():
    """Catches a template that is wrong on this GPU in code of the background."""
    first, *rest = varlen_attention.providers
    varlen_attention.providers[:] = [replace(first, refuses=lambda *_: "wrong", trusted=False), *rest]
    told = providers_now()
    varlen_attention.providers[:] = [first, *rest]
    agree(told)
    assert not varlen_attention.providers[0].supports(torch.ones(1, device="cpu"), torch.ones(1, device="cpu"))
    assert not varlen_attention.providers[0].trusted


def test_their_order_is_that_of_the_training():
    """Measurements put another package's first."""
    first = varlen_attention.providers[0]
    other = replace(first, name="other")
    varlen_attention.providers[:] = [other, first]
    told = providers_now()
    varlen_attention.providers[:] = [first, other]
    agree(told)
    assert [each.name for each in varlen_attention.providers] == ["other", first.name]


def test_one_that_is_not_there_is_an_error():
    told = {**providers_now(), "varlen_attention": (("of another package", True),)}
    with pytest.raises(LookupError):
        agree(told)


def test_ops_that_are_not_known_there_are_left_out():
    agree({**providers_now(), "of_another_package": (("triton", True),)})


@op(cost=Cost.POINTWISE)
def doubled_in_the_background(x: torch.Tensor) -> torch.Tensor:
    """Return twice x."""
    return x + x


def test_modules_of_other_packages_ops():
    graph = Graph()
    given = graph.placeholder("given")
    graph.output((graph.call_function(gated_activation.overload, (given, given)),))
    assert foreign_modules([graph]) == ()
    graph = Graph()
    graph.output((graph.call_function(doubled_in_the_background.overload, (graph.placeholder("given"),)),))
    assert foreign_modules([graph]) == (__name__,)


def test_what_makes_a_score_for_each_pair_of_tokens_runs_by_its_provider(monkeypatch):
    """Its reference would take gigabytes for long rows."""
    ran = []
    made = replace(varlen_attention.fallback(), run=lambda *args: ran.append(args) or (args[0], args[0]))
    monkeypatch.setattr(varlen_attention, "providers", [made])
    run = run_by_provider(varlen_attention.overload)
    assert run is not None
    q = torch.ones(3, 1, 4, device="cpu")
    run(q, q, q, torch.tensor([0, 3], device="cpu"), 3, 1.0, 0, None, True, 0.0)
    assert len(ran) == 1
    assert run_by_provider(gated_activation.overload) is None
    assert run_by_provider(torch.ops.aten.mm.default) is None
