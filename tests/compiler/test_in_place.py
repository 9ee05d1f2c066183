"""A recomputed value makes way for its gradient, so that both never exist at once."""

import copy
import operator

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import tunecompile
from tests.support import zoo
from tests.support.notes import EAGER, find
from tunecompile._torch.autograd import CheckpointPolicy
from tunecompile.compiler.pass_manager import Context
from tunecompile.ops import lora_mlp
from tunecompile.passes import lower, plan
from tunecompile.planner.liveness import extent
from tunecompile.planner.solver import RECOMPUTE

TOKENS, HIDDEN, INNER, RANK = 4096, 2048, 8192, 16
aten = torch.ops.aten
dies = lower.choose_provider._dies


def backward_graph(again: bool) -> GraphModule:
    """The backward of an MLP with adapters on fake GPU tensors. again: it computes gate|up itself."""
    graph, mode = Graph(), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:

        def placeholder(name, *shape):
            node = graph.placeholder(name)
            node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            return node

        x, grad = placeholder("x", 1, TOKENS, HIDDEN), placeholder("tangents_1", 1, TOKENS, HIDDEN)
        weights = [
            placeholder(f"w{i}", *shape) for i, shape in enumerate([(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)])
        ]
        a = [placeholder(f"a{i}", RANK, width) for i, width in enumerate([HIDDEN, HIDDEN, INNER])]
        b = [placeholder(f"b{i}", rows, RANK) for i, rows in enumerate([INNER, INNER, HIDDEN])]
        saved = (
            placeholder("gate_up", 1, TOKENS, 2 * INNER),
            placeholder("xa", TOKENS, 2 * RANK),
            placeholder("xa_down", TOKENS, RANK),
        )
        given = (x, weights, a, b, [1.0] * 3, "dense", "silu")

        def call(op, *args):
            node = graph.call_function(op.overload, args)
            node.meta["val"] = node.target(*torch.fx.map_arg(list(args), lambda n: n.meta["val"]))
            return node

        def member(node, i):
            made = graph.call_function(operator.getitem, (node, i))
            made.meta["val"] = node.meta["val"][i]
            return made

        gate_up = member(call(lora_mlp, *given), 1) if again else saved[0]
        found = call(lora_mlp.backward_op, grad, *given, gate_up, *saved[1:])
        graph.output(tuple(member(found, i) for i in range(7)))
        module = GraphModule(torch.nn.Module(), graph)
        context = Context("layer")
        for each in (lower.choose_provider.PASS, lower.cleanup.PASS):
            each.run(module.graph, context)
    assert not context.notes, context.notes
    return module


def wide(graph):
    return [node for node in graph.nodes if node.target is aten.cat.default and node.meta["val"].shape[-1] > 2 * INNER]


@pytest.mark.gpu
def test_what_is_computed_again_is_written_where_its_gradient_goes():
    (room,) = wide(backward_graph(True).graph)
    product = room.args[0][0]
    assert product.target is aten.mm.default and list(product.users) == [room]


@pytest.mark.gpu
def test_what_was_saved_stays_as_it_is():
    assert not wide(backward_graph(False).graph)


@pytest.mark.gpu
def test_both_are_never_there():
    """Computing gate|up again needs no more memory than where they were saved: their gradient takes their place."""
    again, saved = (extent(backward_graph(kind).graph).peak for kind in (True, False))
    assert again < saved + TOKENS * INNER  # a quarter of gate|up


def named(fn, *values):
    """The graph of `fn`, and its calls by name."""
    graph = make_fx(fn)(*values).graph
    return graph, {node.name: node for node in graph.nodes}


def test_a_product_dies_where_one_call_reads_it():
    graph, nodes = named(
        lambda x, y: ((x @ y).view(2, 2, 4).relu(), x.view(2, 8).relu()), torch.randn(4, 4), torch.randn(4, 4)
    )
    assert dies(nodes["view"]) and not dies(nodes["view_1"])  # of a product; of an input
    graph, nodes = named(lambda x, y: ((z := x @ y).view(2, 8).relu(), z.exp()), torch.randn(4, 4), torch.randn(4, 4))
    assert not dies(nodes["view"])  # `exp` reads it too


def test_a_shape_given_and_taken_back():
    def fn(x, y):
        z = x @ y
        return z.view(2, 2, 4).view(4, 4).relu(), z.view(2, 8).view(8, 2).exp()

    graph, _ = named(fn, torch.randn(4, 4), torch.randn(4, 4))
    lower.cleanup.PASS.run(graph, Context("layer"))
    (relu,), (exp,) = (
        [node for node in graph.nodes if node.target is target] for target in (aten.relu.default, aten.exp.default)
    )
    assert relu.args[0].target is aten.mm.default and exp.args[0].target is aten.view.default


def test_what_is_made_of_a_buffer_that_the_layer_writes_is_saved():
    """A running statistic, say: the backward would read the new one."""

    def joint(primals_1, primals_2, tangents_1):
        scale = primals_1.view(-1).mul(0.9)
        out = (primals_2 / scale).relu()
        grad = (tangents_1 - out) / scale
        primals_1.copy_(scale)
        return out, grad

    graph, _ = named(joint, torch.ones(4), torch.randn(3, 4), torch.randn(3, 4))
    plan.remat.PASS.run(graph, Context("layer", RECOMPUTE))
    tags = {node.target: node.meta.get("recompute") for node in graph.nodes if node.op == "call_function"}
    assert (
        tags[aten.mul.Tensor] is CheckpointPolicy.MUST_SAVE
        and tags[aten.relu.default] is not CheckpointPolicy.MUST_SAVE
    )


class Scaled(nn.Module):
    """By a running statistic that it keeps before it reads it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(0.5).add_(0.5 * x.detach().abs().mean((0, 1)))
        return x + (self.inner(x) * self.scale).tanh()


class Doubled(nn.Module):
    """Of its input, which it keeps before it reads it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        x.mul_(2)
        return x + self.inner(x.sin()).tanh()


def trains_as_eager(layer, optimized):
    """Three steps of two layers; the report."""
    torch.manual_seed(0)
    reference = zoo.Stack(layer).train()
    model = optimized(copy.deepcopy(reference))
    for _ in range(3):
        x = torch.randn(2, 4, 16)
        losses = [each(x.clone()) for each in (reference, model)]
        [loss.backward() for loss in losses]
        torch.testing.assert_close(losses[1], losses[0])
        for ours, theirs in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)
    report = tunecompile.report(model)
    assert not find(report, *EAGER), report
    return report


def checkpointed(model, executor="inductor"):
    for layer in model.layers:
        layer.gradient_checkpointing = True
    return tunecompile.optimize(model, executor=executor)


@pytest.mark.parametrize("layer", [Scaled, Doubled])
def test_a_layer_that_writes_before_it_reads(layer):
    """AOTAutograd copies into a buffer, or an input, behind the graph: recomputation must not begin with the new value."""
    trains_as_eager(layer, lambda model: tunecompile.optimize(model, executor="eager"))
    trains_as_eager(layer, lambda model: checkpointed(model, "eager"))
