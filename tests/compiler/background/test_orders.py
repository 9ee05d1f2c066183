"""What an order tells of the training, and what stands there in the place of its passes."""

import pickle
from types import SimpleNamespace

import pytest
from torch.fx import Graph

from tunecompile.compiler.background.orders import KnownLowering, KnownPartitioner, others_of
from tunecompile.compiler.partitioner import Lowering, Partitioner
from tunecompile.compiler.pass_manager import Context, Pass


def told(*passes):
    """Of a compilation with these passes."""
    context = Context("layer")
    return others_of(Lowering(passes, context), Partitioner(passes, context), [Graph()])[1]


def guest(name, stage, failed=()):
    package = SimpleNamespace(key="package", failed=dict.fromkeys(failed))
    return Pass(name, stage, print, package=package)


def test_passes_of_final_graphs_are_sent():
    """Catches one of an earlier stage, which would run twice."""
    ours = Pass("lowers", "lower", print)
    passes, lowered, cut, (region, *_), providers = told(Pass("recognizes", "recognize", print), ours)
    assert passes == (ours,) and region == "layer"
    assert lowered and cut and providers


def test_another_packages_pass_of_final_graphs_is_not_sent():
    """It may be switched off in one of the two processes."""
    with pytest.raises(ValueError, match=r"the pass theirs of .* runs on its final graphs"):
        told(guest("theirs", "lower"))
    assert told(guest("theirs", "recognize"))[0] == ()
    assert told(guest("theirs", "lower", failed=["theirs"]))[0] == ()


def test_what_stands_in_their_place_has_their_name_and_runs_them():
    ran = []
    lower = KnownLowering(
        [Pass("lowers", "lower", lambda graph, context: ran.append(context))], "key", Context("layer")
    )
    lower(Graph())
    assert ran == [lower.context]
    assert lower.uuid() == "key" and pickle.loads(pickle.dumps(lower)) == "key"
    cut = KnownPartitioner("cut")
    assert cut.uuid() == "cut"
    with pytest.raises(AssertionError):
        cut()
