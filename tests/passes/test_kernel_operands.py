"""What several launches of kernels read is computed once, where it stands."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tunecompile.compiler.pass_manager import Context
from tunecompile.passes import lower

aten = torch.ops.aten


class Launch:
    """In the place of torch's operator, which needs Triton."""

    __name__ = "triton_kernel_wrapper_functional"

    def __call__(self, **kwargs):
        raise AssertionError("it is not run")


LAUNCH = Launch()


class Built:
    """A graph of one input, [4, 6], whose launches read what is said."""

    def __init__(self, dynamic=False):
        self.mode, self.graph = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None), Graph()
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = self.mode.from_tensor(torch.zeros(4, 6))

    def call(self, target, *args):
        node = self.graph.call_function(target, args)
        with self.mode:
            node.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    def launch(self, writes=(), **operands):
        node = self.graph.call_function(LAUNCH, (), {"kwargs": operands, "tensors_to_clone": list(writes)})
        node.meta["val"] = {}
        return node

    def run(self, *returned):
        """The nodes that the pass has put in."""
        self.graph.output(returned)
        lower.kernel_operands.PASS.run(self.graph, Context("layer"))
        self.graph.lint()
        return self.graph.find_nodes(op="call_function", target=aten.as_strided.default)


def test_an_operand_of_two_launches_is_stored_once():
    """Left alone, Inductor copies it for each launch. What is stored is not stored again by a second run."""
    made = Built()
    y = made.call(aten.mul.Tensor, made.x, 2)
    launches = [made.launch(a=y), made.launch(b=y)]
    (stored,) = made.run(*launches)
    assert stored.args == (y, [4, 6], [6, 1]) and set(y.users) == {stored}
    assert stored.meta["val"] is y.meta["val"]
    assert [launch.kwargs["kwargs"] for launch in launches] == [{"a": stored}, {"b": stored}]
    lower.kernel_operands.PASS.run(made.graph, Context("layer"))
    assert made.graph.find_nodes(op="call_function", target=aten.as_strided.default) == [stored]


def test_other_readers_and_views_read_what_is_stored():
    made = Built()
    y = made.call(aten.mul.Tensor, made.x, 2)
    view = made.call(aten.view.default, y, [24])
    launch, sum_ = made.launch(a=view), made.call(aten.add.Tensor, y, 1)
    (stored,) = made.run(launch, sum_)
    assert view.args[0] is stored and sum_.args[0] is stored and set(y.users) == {stored}


@pytest.mark.parametrize("kind", ["alone", "written", "product", "joined", "returned", "input", "gaps"])
def test_what_stays(kind):
    made = Built()
    y, back = made.call(aten.mul.Tensor, made.x, 2), []
    if kind == "product":
        y = made.call(aten.mm.default, y, made.call(aten.t.default, made.x))
    elif kind == "joined":
        y = made.call(aten.cat.default, [y, y], 1)
    elif kind == "input":
        y = made.x
    elif kind == "returned":
        back = [made.call(aten.view.default, y, [24])]
    elif kind == "gaps":
        y = made.call(aten.mul.Tensor, made.call(aten.t.default, made.x), 2)
    launches = [made.launch(a=y)]
    if kind != "alone":
        launches.append(made.launch(("b",) if kind == "written" else (), b=y))
    assert made.run(*launches, *back) == []


def test_sizes_that_change_stay_symbols():
    """Constants in their place would store as many rows as the batch had that was traced."""
    made = Built(dynamic=True)
    y = made.call(aten.mul.Tensor, made.x, 2)
    (stored,) = made.run(made.launch(a=y), made.launch(b=y))
    _, sizes, (stride, one) = stored.args
    assert [(size.target, size.args) for size in sizes] == [(aten.sym_size.int, (y, i)) for i in range(2)]
    assert (stride.target, stride.args, one) == (aten.sym_stride.int, (y, 0), 1)
    assert tuple(size.meta["val"] for size in sizes) == tuple(y.meta["val"].shape)
