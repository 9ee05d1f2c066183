"""Respelling changes no value: every spelling of the table against what torch computes, and equal spellings become equal graphs."""

import operator

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes.run import Recorder, check, random
from tunecompile.ir.canonicalize import TABLE
from tunecompile.ir.nodes import is_barrier


def graph(fn, *args):
    torch._dynamo.reset()
    recorder = Recorder([])
    torch.compile(fn, backend=recorder)(*args)
    (made,) = recorder.seen.graphs
    names, lines = {}, []
    for node in made.nodes:  # names differ between spellings, structure must not
        names[node] = len(names)
        lines.append((node.op, str(node.target), torch.fx.map_arg((node.args, node.kwargs), lambda n: names[n])))
    return [(op, target if op != "placeholder" else "", args) for op, target, args in lines if op != "output"]


SAME = {
    "add": [lambda x: x + 2.0, lambda x: torch.add(x, 2.0), lambda x: x.add(2.0)],
    "mul": [
        lambda x: x * 2.0,
        lambda x: torch.mul(x, 2.0),
        lambda x: x.mul(2.0),
        lambda x: torch.multiply(x, 2.0),
        lambda x: x.multiply(2.0),
    ],
    "div": [lambda x: x / 2.0, lambda x: torch.div(x, 2.0), lambda x: x.div(2.0), lambda x: x.true_divide(2.0)],
    "square": [
        lambda x: x.pow(2),
        lambda x: x**2,
        lambda x: torch.pow(x, 2),
        lambda x: x.square(),
        lambda x: torch.square(x),
        lambda x: x * x,
    ],
    "neg": [lambda x: -x, lambda x: torch.neg(x), lambda x: x.neg()],
    "rsqrt": [lambda x: torch.rsqrt(x), lambda x: x.rsqrt(), lambda x: x.pow(-0.5), lambda x: x**-0.5],
    "sigmoid": [lambda x: torch.sigmoid(x), lambda x: x.sigmoid(), lambda x: F.sigmoid(x)],
    "tanh": [lambda x: torch.tanh(x), lambda x: x.tanh(), lambda x: F.tanh(x)],
    "cast": [
        lambda x: x.double(),
        lambda x: x.to(torch.float64),
        lambda x: x.to(dtype=torch.float64),
        lambda x: x.type(torch.float64),
    ],
    "no cast": [
        lambda x: x.float() + 1,
        lambda x: x.to(torch.float32) + 1,
        lambda x: x.type_as(x) + 1,
        lambda x: x + 1,
    ],
    "mean": [
        lambda x: x.mean(-1, keepdim=True),
        lambda x: torch.mean(x, -1, True),
        lambda x: x.mean(dim=(-1,), keepdim=True),
        lambda x: torch.mean(x, dim=[-1], keepdim=True),
    ],
    "cat": [
        lambda x: torch.cat((x, x), -1),
        lambda x: torch.cat([x, x], dim=-1),
        lambda x: torch.concat(tensors=(x, x), dim=-1),
    ],
    "chunk": [lambda x: torch.chunk(x, 2, -1)[1], lambda x: x.chunk(2, dim=-1)[1]],
    "stack": [
        lambda x: torch.stack((x, x), -1),
        lambda x: torch.stack([x, x], dim=-1),
        lambda x: torch.stack(tensors=(x, x), dim=-1),
    ],
    "flatten": [
        lambda x: x.flatten(0),
        lambda x: torch.flatten(x),
        lambda x: x.flatten(start_dim=0, end_dim=-1),
        lambda x: torch.flatten(input=x, start_dim=0),
    ],
    "pairs": [
        lambda x: torch.stack((x, x), -1).flatten(-2, -1),
        lambda x: torch.stack((x, x), -1).flatten(-2),
        lambda x: torch.stack((x, x), -1).reshape(4, 8),
        lambda x: torch.stack((x, x), -1).view(4, -1),
        lambda x: torch.reshape(torch.stack((x, x), -1), (4, 8)),
    ],
    "linear": [
        lambda x: F.linear(x, x),
        lambda x: F.linear(x, weight=x),
        lambda x: F.linear(x, x, None),
        lambda x: F.linear(input=x, weight=x, bias=None),
    ],
    "product": [
        lambda x: F.linear(x, x),
        lambda x: x @ x.T,
        lambda x: x @ torch.ops.aten.numpy_T(x),  # as Dynamo of torch 2.15 records it
        lambda x: x @ x.t(),
        lambda x: torch.matmul(x, x.T),
        lambda x: x.matmul(torch.t(x)),
        lambda x: torch.mm(x, x.t()),
        lambda x: x.mm(x.transpose(0, 1)),
        lambda x: x @ torch.transpose(x, 1, 0),
        lambda x: x @ x.permute(1, 0),
        lambda x: x @ x.permute((1, 0)),
    ],
    "silu": [lambda x: F.silu(x), lambda x: F.silu(x, inplace=False), torch.nn.SiLU()],
    "relu": [
        lambda x: F.relu(x),
        lambda x: F.relu(x, inplace=False),
        lambda x: torch.relu(x),
        lambda x: x.relu(),
        torch.nn.ReLU(),
    ],
    "gelu": [lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="none"), torch.nn.GELU()],
    "dropout": [lambda x: F.dropout(x, 0.0) + 1, lambda x: F.dropout(x, 0.5, training=False) + 1, lambda x: x + 1],
    "unsqueeze": [lambda x: x.unsqueeze(0), lambda x: torch.unsqueeze(x, 0), lambda x: x.unsqueeze(dim=0)],
    "rms_norm": [
        lambda x: F.rms_norm(x, (4,), None, 1e-3),
        lambda x: torch.rms_norm(x, (4,), None, 1e-3),
        lambda x: F.rms_norm(x, normalized_shape=(4,), eps=1e-3),
    ],
}


def test_a_product_in_half_precision_is_no_power():
    """CUDA's autocast computes powers in fp32, and leaves products as they are: respelled, the result would have another dtype."""
    power = graph(lambda x: x**2, torch.rand(4, 4).bfloat16())
    assert (
        graph(lambda x: x * x, torch.rand(4, 4).bfloat16())
        != power
        == graph(lambda x: x.square(), torch.rand(4, 4).bfloat16())
    )


def test_a_power_in_half_precision_is_no_root():
    """Each would be rounded in another way."""
    x = torch.rand(4, 4).half()
    assert graph(lambda x: x**-0.5, x) != graph(lambda x: x.rsqrt(), x)


@pytest.mark.parametrize("name", SAME)
def test_spellings_of_one_operation(name):
    x = torch.rand(4, 4) + 0.5
    first, *others = SAME[name]
    for fn in SAME[name]:
        check(fn, x.clone().requires_grad_(), passes=[], whole=False, tol=1e-6)
    for other in others:
        assert graph(other, x) == graph(first, x)


DIFFERENT = [
    lambda x: torch.add(x, x, alpha=3),
    lambda x: x.sub(x.sin(), alpha=2),
    lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    lambda x: x.mean(),
    lambda x: x.mean(0),
    lambda x: x.mean(-1, dtype=torch.float64),
    lambda x: x.mean((0, 1), keepdim=True),
    lambda x: 2.0 - x,
    lambda x: 2.0 / x,
    lambda x: 2.0**x,
    lambda x: x**x,
    lambda x: x**3,
    lambda x: x.pow(0.5),
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: x.to("cpu"),
    lambda x: x.to(torch.float64, copy=True),
    lambda x: x.to(torch.float32, False, True).add_(1) + x,
    lambda x: x.to(x),
    lambda x: torch.cat((x, x)),
    lambda x: torch.cat((x, x), 0),
    lambda x: x.chunk(3)[1],
    lambda x: x.type(torch.float64),
    lambda x: x.type_as(x.double()),
    lambda x: x.mean(axis=-1),
    lambda x: x.to(torch.bfloat16).to(torch.float32),
    lambda x: x.half().float(),
    lambda x: torch.rsub(x, 1.0, alpha=2),
    lambda x: torch.mul(2.0, x),
    lambda x: x.__rmul__(3),
    lambda x: torch.stack((x, x)),
    lambda x: torch.stack((x, x), 1).reshape(8, 4),
    lambda x: torch.stack((x, x), -1).reshape(8, 4),
    lambda x: torch.stack((x, x), -1).view(-1),
    lambda x: x.reshape(2, 8),
    lambda x: x.unflatten(0, (2, 2)).flatten(0, 1),
    lambda x: x @ x,
    lambda x: x.T @ x,
    lambda x: x @ x.mT,
    lambda x: x @ x.T.sin(),
    lambda x: x @ x.transpose(0, 0),
    lambda x: x @ x[0].t(),
    lambda x: x @ x.permute(0, 1),
    lambda x: x @ x.expand(4, 4, 4).transpose(0, 1),
    lambda x: x.T + x @ x.T,
    lambda x: torch.matmul(input=x, other=x.T),
    lambda x: (x.unflatten(0, (2, 2)) @ x.T).transpose(0, 1),
]


def test_a_transpose_that_was_taken_without_a_gradient_gets_none():
    def fn(x, w):
        with torch.no_grad():
            turned = w.T
        return x @ turned

    check(fn, random(3, 4), random(5, 4), passes=[])


@pytest.mark.parametrize("shape", [(4,), (2, 4), (3, 2, 4), (2, 0, 4), (5, 3, 2, 4)])
def test_a_respelled_product_has_the_strides_that_it_had(shape):
    """What reads it may be a view."""
    for turn in (lambda x: x, lambda x: x.transpose(0, -2) if x.dim() > 2 else x):
        x, w = turn(torch.randn(shape)), torch.randn(5, 4)
        assert (x @ w.T).stride() == F.linear(x, w).stride()


@pytest.mark.parametrize("i", range(len(DIFFERENT)))
def test_what_is_not_in_the_table_keeps_its_meaning(i):
    check(DIFFERENT[i], (torch.rand(4, 4) + 0.5).requires_grad_(), passes=[], whole=False, tol=1e-6)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x - x.mean(-1, keepdims=True),
        lambda x: torch.chunk(x, 2, axis=-1)[0],
        lambda x: x.chunk(2, axis=1)[1],
        lambda x: torch.cat([x, x.sin()], axis=-1),
        lambda x: torch.concat((x, x.sin()), axis=1),
        lambda x: torch.unsqueeze(x, axis=0),
        lambda x: torch.mean(input=x, dim=-1),
        lambda x: x.chunk(chunks=2, dim=-1)[0],
        lambda x: torch.chunk(input=x, chunks=2)[0],
        lambda x: torch.square(input=x),
        lambda x: F.dropout(input=x, p=0.0) + 1,
        lambda x: F.silu(input=x),
        lambda x: F.gelu(input=x),
        lambda x: torch.unsqueeze(input=x, dim=0),
        lambda x: torch.add(input=x, other=2.0),
        lambda x: torch.pow(x, exponent=2),
        lambda x: torch.cat(tensors=(x, x)),
        lambda x: torch.rsqrt(input=x.abs() + 1),
        lambda x: F.linear(weight=x, input=x),
        lambda x: torch.mul(input=x, other=x),
        lambda x: x.type_as(x.double()),
    ],
)
def test_keywords(fn):
    check(fn, random(4, 4), passes=[])


@pytest.mark.parametrize(
    "args, kwargs, spelt",
    [
        ((), {}, (0.5, True)),
        ((0.1,), {"training": False}, (0.1, False)),
        ((0.1, True, False), {}, (0.1, True)),
        ((0.1, True, True), {}, None),  # in place, with which it would no longer write to its argument
        ((), {"p": 0.1, "inplace": True}, None),
        ((), {"seed": 1}, None),
    ],
)
def test_the_spelling_of_a_dropout(args, kwargs, spelt):
    dropout = node(lambda graph, x: graph.call_function(F.dropout, (x, *args), kwargs))
    expected = spelt and ("call_function", F.dropout, (dropout.args[0], *spelt), {})
    assert TABLE[F.dropout](dropout) == expected


@pytest.mark.parametrize(
    "called, spelt",
    [
        (F.layer_norm, ((4,), None, None, 1e-5)),
        (torch.layer_norm, ((4,), None, None, 1e-5)),
        (F.rms_norm, ((4,), None, torch.finfo(torch.float32).eps)),
    ],
)
def test_a_norm_that_is_called_without_an_epsilon(called, spelt):
    norm = node(lambda graph, x: graph.call_function(called, (x, (4,))))
    norm.args[0].meta["example_value"] = torch.ones(2, 4, dtype=torch.bfloat16)
    kind, target, args, kwargs = TABLE[called](norm)
    assert (kind, target.__name__, kwargs) == ("call_function", called.__name__, {})
    assert args == (norm.args[0], *spelt)


def node(build):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    return build(graph, x)


@pytest.mark.parametrize(
    "build, barrier",
    [
        (lambda g, x: g.call_method("add_", (x, 1)), True),
        (lambda g, x: g.call_function(torch.sin_, (x,)), True),
        (lambda g, x: g.call_method("__len__", (x,)), False),
        (lambda g, x: g.call_function(F.relu, (x,), {"inplace": True}), True),
        (lambda g, x: g.call_function(torch.add, (x, 1), {"out": x}), True),
        (lambda g, x: g.call_function(torch.ops.aten.add_.Tensor, (x, 1)), True),
        (lambda g, x: g.call_function(torch.ops.aten.add.Tensor, (x, 1)), False),
        (lambda g, x: g.call_function(torch._C._set_grad_enabled, (False,)), True),
        (lambda g, x: g.call_function(F.relu, (x,)), False),
        (lambda g, x: g.call_function(__import__("operator").setitem, (x, 0, 1)), True),
        (lambda g, x: g.call_function(__import__("operator").iadd, (x, 1)), True),
        (lambda g, x: g.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", None, True, None)), True),
        (lambda g, x: g.call_function(__import__("operator").ipow, (x, 2)), True),
        (lambda g, x: g.call_function(F.silu, (x, True)), True),
        (lambda g, x: g.call_function(F.dropout, (x, 0.5, True, True)), True),
    ],
)
def test_barriers(build, barrier):
    assert bool(node(build)) is True and is_barrier(node(build)) is barrier


def test_bodies_of_checkpoints_are_respelled_too():
    def body(x):
        return torch.mul(x, x).float()

    torch._dynamo.reset()
    seen = []

    def backend(gm, inputs):
        from tunecompile._torch.fake_tensors import copied
        from tunecompile.ir.canonicalize import canonicalize

        work = copied(gm)
        canonicalize(work)
        seen.extend(
            str(n.target)
            for m in work.modules()
            if isinstance(m, torch.fx.GraphModule)
            for n in m.graph.nodes
            if n.op in ("call_function", "call_method")
        )
        return gm.forward

    x = random(3, 3)
    torch.compile(lambda x: torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False), backend=backend)(x)
    assert any("pow" in s for s in seen) and "float" not in seen


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (lambda y: (y, y.clone()))(torch.sin(x)),
        lambda x: (x + 0, x.clone()),
        lambda x: (x + 0, x.detach().clone()),
        lambda x: (x + 0, x.view(-1).clone()),
        lambda x: (x + 0, torch.clone(x.t())),
        lambda x: (x + 0, torch.cat(x.chunk(2, -1), -1)),
        lambda x: (lambda y: (y, torch.cat(y.split([1, 3], 1), 1)))(torch.sin(x)),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_results_share_no_memory_that_eager_s_do_not(fn, grad):
    """The caller may change what a region returned."""
    torch._dynamo.reset()
    from tunecompile.compiler.backend import Backend
    from tunecompile.passes import PIPELINE

    x = torch.rand(4, 4, requires_grad=grad) * 1.0
    kept = x.detach().clone()
    first, second = torch.compile(fn, backend=Backend("test", PIPELINE, "eager"))(x)
    before = first.detach().clone()
    second.mul_(0.0)
    assert torch.equal(x, kept) and torch.equal(first, before)


def before_an_addition(x):
    y = x * 1.5
    c = y.clone()
    y.add_(1)
    return c * 2


def of_a_view(x):
    y = x * 1.5
    c = y[0].clone()
    y[0].mul_(3)
    return torch.sin(c) + y[1]


def of_what_an_operator_writes(x):
    y = x * 1.5
    c = torch.clone(y)
    y *= 2
    return c + y


@pytest.mark.parametrize("fn", [before_an_addition, of_a_view, of_what_an_operator_writes])
def test_a_copy_of_what_is_written_later_stays(fn):
    check(fn, random(2, 4), passes=[])


def scaled_twice(x):
    return torch.mul(x * 2, 0.25) + (x * 3.0) * x


def a_number_that_is_read_too(x):
    y = x * 2.0
    return y * 0.5 + y


def scaled_in_place_between(x):
    y = x.clone()
    z = y * 2.0
    y.mul_(3.0)
    return z * 0.5 + y


NUMBERS = [(scaled_twice, [0.5, 3.0]), (a_number_that_is_read_too, [2.0, 0.5]), (scaled_in_place_between, [2.0, 0.5])]


@pytest.mark.parametrize("fn, factors", NUMBERS)
def test_numbers_that_multiply_one_after_the_other_are_one(fn, factors):
    (made,) = check(fn, random(2, 4), passes=[]).graphs
    products = [node.args[1] for node in made.nodes if node.target is operator.mul]
    assert [each for each in products if isinstance(each, float)] == factors
