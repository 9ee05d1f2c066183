"""Element-wise results are recomputed where what they are computed of is saved anyway, and nowhere else."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph

import tunecompile
from tests.support.zoo import Stack
from tunecompile._torch.autograd import CheckpointPolicy
from tunecompile.cli.compare.meters import count_saved_bytes
from tunecompile.ops import rms_norm
from tunecompile.planner.candidates import backward_nodes
from tunecompile.planner.least_saved import results_to_recompute

aten = torch.ops.aten
ROWS, WIDTH, INNER = 8, 16, 64
SAVED = ROWS * INNER * 8  #: bytes of one value between the linears, in fp64


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu, tanh, written out": tanh_gelu,
    "gelu, quick": lambda x: x * torch.sigmoid(1.702 * x),
    "squared relu": lambda x: F.relu(x).square(),
    "softplus": F.softplus,
}


def mlp(activation, inner=INNER, rate=0.0):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(WIDTH, inner), torch.nn.Linear(INNER, WIDTH)

        def forward(self, x):
            return self.down(F.dropout(activation(self.up(x)), rate, self.training))

    torch.manual_seed(0)
    return Stack(Layer, 3).double()


def given():
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def trained(model):
    loss = model(given())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def saved(activation, **options) -> int:
    """Bytes that a layer saves beside its input, by the report; autograd has to hold no more."""
    model = tunecompile.optimize(mlp(activation, **options).train(), executor="eager")
    held = count_saved_bytes(model, lambda: model(given()))
    by_report = tunecompile.report(model).regions[0].saved_bytes[-1]
    assert held <= 3 * (by_report + ROWS * WIDTH * 8) + 1024
    return by_report


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_one_value_is_saved_of_an_activation_between_linears(activation):
    """Two were: what the activation reads, and what it returns."""
    assert saved(activation) == SAVED
    eager, ours = mlp(activation), tunecompile.optimize(mlp(activation).train(), executor="eager")
    for got, expected in zip(trained(ours), trained(eager), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("activation", [torch.relu, torch.tanh, torch.sigmoid])
def test_a_derivative_of_the_result_alone_needs_nothing_else(activation):
    assert saved(activation) == SAVED


def test_half_of_a_wide_linear_that_gates_the_other():
    """Views of one value: that value is saved, and neither the gate nor the product."""

    def gated(x):
        gate, up = x.chunk(2, -1)
        return torch.sigmoid(1.702 * gate) * (up + 1)

    assert saved(gated, inner=2 * INNER) == 2 * SAVED


def test_dropout_between_the_linears_keeps_its_mask():
    """Random numbers are drawn once: a second draw would give the backward another result than the forward returned."""
    torch.manual_seed(0)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = (torch.nn.Linear(INNER, INNER, bias=False) for _ in range(2))
            torch.nn.init.eye_(self.down.weight)

        def forward(self, x):
            return self.down(F.dropout(F.gelu(self.up(x)), 0.5))

    layer = Layer().double()
    run = tunecompile.optimize(layer.train(), executor="eager")
    made = run(torch.randn(ROWS, INNER, dtype=torch.float64))
    made.backward(seen := torch.randn_like(made))
    assert 0 < (made == 0).sum() < made.numel()
    torch.testing.assert_close(layer.down.weight.grad, seen.T @ made.detach())  # the product's operand is `made` itself
    assert saved(F.gelu, rate=0.5) == SAVED + SAVED // 8


class Joint:
    """A joint graph, made by hand."""

    def __init__(self):
        self.graph = Graph()
        self.tangent = self.input("tangents_1", ROWS, WIDTH)

    def input(self, name, *shape, dtype=torch.float32):
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def __call__(self, target, *args, dtype=torch.float32, shape=(ROWS, WIDTH)):
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def product(self):
        return self(aten.mm.default, self.input("x", ROWS, 4), self.input("w", 4, WIDTH))

    def recomputed(self, *read_in_memory, read_in_registers=()):
        """What is to be, where the backward multiplies by the former and, element by element, by the latter."""
        ends = [self(aten.mm.default, self.tangent, node) for node in read_in_memory]
        ends += [self(aten.mul.Tensor, self.tangent, node) for node in read_in_registers]
        self.graph.output(tuple(ends))
        return results_to_recompute(self.graph, backward_nodes(self.graph))


def test_of_two_results_of_one_value_both_are_recomputed():
    joint = Joint()
    x = joint.product()
    results = [joint(target, x) for target in (aten.relu.default, aten.sigmoid.default)]
    assert joint.recomputed(*results) == set(results)


def test_a_lone_result_is_saved():
    joint = Joint()
    assert joint.recomputed(joint(aten.relu.default, joint.product())) == set()


def test_a_result_of_two_values_is_recomputed_only_if_both_are_saved_anyway():
    for others, expected in (0, False), (1, False), (2, True):
        joint = Joint()
        factors = joint.product(), joint(aten.mm.default, *joint.graph.find_nodes(op="placeholder")[1:3])
        made = joint(aten.mul.Tensor, *factors)
        assert joint.recomputed(made, read_in_registers=factors[:others]) == ({made} if expected else set())


@pytest.mark.parametrize("others", range(3))
def test_values_that_are_joined_are_saved_once(others):
    """Attention beside an MLP before one linear: the joined value is none more where its parts are saved anyway."""
    joint = Joint()
    parts = joint.product(), joint(aten.mm.default, *joint.graph.find_nodes(op="placeholder")[1:3])
    joined = joint(aten.cat.default, [*parts], -1, shape=(ROWS, 2 * WIDTH))
    assert joint.recomputed(joined, read_in_registers=parts[:others]) == ({joined} if others else set())


def test_bytes_count_and_not_tensors():
    """A narrow result of a wide value stays, though its value and the derivative are two tensors, too."""
    joint = Joint()
    x = joint(aten.mm.default, joint.input("x", ROWS, 4), joint.input("w", 4, WIDTH), dtype=torch.float64)
    narrow = [joint(aten.gt.Scalar, x, i, dtype=torch.bool) for i in range(2)]
    assert joint.recomputed(narrow[0], read_in_registers=narrow[1:]) == set()


def test_copies_of_weights_are_saved_as_they_were():
    joint = Joint()
    weight = joint.input("weight", ROWS, WIDTH)
    narrow = joint(aten.mul.Tensor, joint(aten.view.default, weight, [ROWS, WIDTH]), 2.0)
    assert joint.recomputed(narrow, read_in_registers=[weight]) == set()


def test_a_cast_of_what_is_recomputed_from_inputs_is_recomputed_too():
    """Of a layer's first norm, as autocast casts it for the linears: the layer's input is there, and read anyway."""
    for tag in (CheckpointPolicy.MUST_RECOMPUTE, None):
        joint = Joint()
        x = joint.input("x", ROWS, WIDTH, dtype=torch.bfloat16)
        normed = joint(rms_norm.overload, x, joint.input("weight", WIDTH), 1e-5, 0.0, True)
        if tag is not None:
            normed.meta["recompute"] = tag
        narrow = joint(aten._to_copy.default, joint(aten.view.default, normed, [ROWS, WIDTH]), dtype=torch.bfloat16)
        assert joint.recomputed(narrow, read_in_registers=[x]) == ({narrow} if tag is not None else set())


def test_what_is_read_in_registers_is_left_to_the_partitioner():
    joint = Joint()
    x = joint.product()
    assert joint.recomputed(read_in_registers=[joint(aten.relu.default, x), x]) == set()


def test_what_a_saved_result_is_computed_of_is_left_to_the_partitioner():
    joint = Joint()
    x = joint.product()
    other = joint(aten.mm.default, *joint.graph.find_nodes(op="placeholder")[1:3])
    inner = joint(aten.relu.default, x)
    assert joint.recomputed(joint(aten.mul.Tensor, inner, other), read_in_registers=[x, inner]) == set()


def test_what_has_to_be_saved_is_never_recomputed():
    """A reader of a buffer that the forward mutates: what it reads has changed by then."""
    joint = Joint()
    x = joint.product()
    first = joint(aten.relu.default, x)
    first.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    second = joint(aten.mul.Tensor, first, 2.0)
    assert joint.recomputed(first, second, read_in_registers=[x]) == {second}
