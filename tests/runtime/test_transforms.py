"""Models under transforms of `torch.func` and forward-mode derivatives, which compiled code cannot be: such calls run as they would without us, and the report says so."""

import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import tunecompile
from tests.support import zoo
from tests.support.models.custom import WIDTH, Plain
from tests.support.notes import has

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def loss(model, parameters, ids):
    return functional_call(model, parameters, kwargs={"input_ids": ids, "labels": ids}).loss


def gradients_of_each_row(model, parameters, ids):
    gradients = grad(lambda given, row: loss(model, given, row[None]))
    return vmap(lambda row: gradients(parameters, row), randomness="different")(ids)


def slope(model, parameters, ids):
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        duals = {name: forward_ad.make_dual(parameter, parameter) for name, parameter in parameters.items()}
        return {"slope": forward_ad.unpack_dual(loss(model, duals, ids)).tangent}


@pytest.mark.parametrize("transform", [gradients_of_each_row, slope])
def test_calls_under_a_transform(transform):
    reference = zoo.make("llama", num_hidden_layers=2).train()
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    ids = zoo.batch()["input_ids"]
    ours, theirs = (
        transform(m, {name: p.detach() for name, p in m.named_parameters()}, ids) for m in (model, reference)
    )
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected)
    report = tunecompile.report(model)
    assert report.compiles == 0 and has(report, "transformed"), report
    zoo.step(model, zoo.batch())
    assert tunecompile.report(model).compiles == 1


def test_a_model_without_layers_under_a_transform():
    reference = Plain().train()
    model, x = tunecompile.optimize(copy.deepcopy(reference), executor="eager"), torch.randn(3, WIDTH)
    ours, theirs = (
        grad(lambda given: functional_call(m, given, x)["out"].square().sum())(
            {n: p.detach() for n, p in m.named_parameters()}
        )
        for m in (model, reference)
    )
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected)
    assert has(model, "transformed")
