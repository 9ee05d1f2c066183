"""Providers are traced once: later compilations get the same graph, with fake values of their own."""

import dataclasses
import importlib
import operator

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from tunecompile.compiler.pass_manager import Context
from tunecompile.ir.op import Cost, Provider, op
from tunecompile.ir.pretend_gpu import as_on_gpu
from tunecompile.ops import dequantize_mxfp4, gated_activation, grouped_lora_linear, lora_linear, varlen_attention
from tunecompile.planner.cost_model import graph_work

choose_provider = importlib.import_module("tunecompile.passes.lower.choose_provider")
PAIR = gated_activation, (torch.randn(3, 8), torch.randn(3, 8), "silu")
WEIGHTS = [torch.randn(6, 8)], [], [torch.randn(2, 8)], [torch.randn(6, 2)], [0.5], torch.float32, "dense"
LORA = lora_linear, (torch.randn(3, 8), [], *WEIGHTS)


@op(cost=Cost.POINTWISE)
def halved_in_a_test(x: Tensor) -> Tensor:
    return x / 2


@op(cost=Cost.POINTWISE, opaque=True)
def kept_in_a_test(x: Tensor) -> Tensor:
    return x / 2


@pytest.fixture
def traces(monkeypatch):  # with it, caches of other tests are set aside (tests/conftest.py)
    """Functions that were traced."""
    made, trace = [], choose_provider.trace
    monkeypatch.setattr(choose_provider, "trace", lambda fn, *args: made.append(fn) or trace(fn, *args))
    return made


def lowered(operation, arguments, mode, static=True, dead=(), context=None):
    """A graph of one call, lowered, of which some results are not read."""
    graph = Graph()

    def placed(value):
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = mode.from_tensor(value, static_shapes=static)
        return node

    nodes = tuple(pytree.tree_map(placed, list(arguments)))
    call = graph.call_function(operation.overload, nodes)
    call.meta.update(val=operation(*torch.fx.map_arg(nodes, lambda node: node.meta["val"])), stack_trace="a line")
    count = 0 if isinstance(call.meta["val"], Tensor) else len(call.meta["val"])
    results = [graph.call_function(operator.getitem, (call, i)) for i in range(count)] or [call]
    graph.output(tuple(result for at, result in enumerate(results) if at not in dead))
    gm = GraphModule({}, graph)
    choose_provider.PASS.run(gm.graph, context or Context("layers"))
    gm.recompile()
    return gm


def values(gm, key="val"):
    return [node.meta.get(key) for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("operation, arguments", [PAIR, LORA], ids=["one result", "two results"])
def test_a_second_compilation_gets_the_graph_of_the_first(operation, arguments, traces):
    first, second = (lowered(operation, arguments, FakeTensorMode(shape_env=ShapeEnv())) for _ in range(2))
    assert len(traces) == 1 and first.code == second.code
    modes = {value.fake_mode for value in pytree.tree_leaves(values(second))}
    assert len(modes) == 1 and not modes & {value.fake_mode for value in pytree.tree_leaves(values(first))}
    for ours, theirs in zip(pytree.tree_leaves(values(second)), pytree.tree_leaves(values(first)), strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert ours.storage_offset() == theirs.storage_offset() and not ours.requires_grad
    assert values(second, "stack_trace") == values(first, "stack_trace") and "a line" in values(first, "stack_trace")
    tensors = [value for value in pytree.tree_leaves(list(arguments)) if isinstance(value, Tensor)]
    expected = operation.reference(*arguments)
    torch.testing.assert_close(second(*tensors), expected if isinstance(expected, tuple) else (expected,))


def test_calls_in_one_graph_have_values_of_their_own(traces):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    both = [pytree.tree_leaves(values(lowered(*PAIR, mode))) for _ in range(2)]
    assert len(traces) == 1 and not {id(value) for value in both[0]} & {id(value) for value in both[1]}


@pytest.mark.parametrize(
    "operation, arguments, static",
    [(*PAIR, False), (halved_in_a_test, (torch.randn(3, 8),), True)],
    ids=["symbols", "an op of another package"],
)
def test_what_is_traced_anew(operation, arguments, static, traces):
    """Symbols have a meaning in one fake mode; and users define their functions again."""
    for count in (1, 2):
        lowered(operation, arguments, FakeTensorMode(shape_env=ShapeEnv()), static)
        assert len(traces) == count


@pytest.mark.parametrize("provider", ["absent", "refuses", "fails", "runs"])
def test_an_opaque_op_stays_where_no_provider_runs(provider, monkeypatch):
    """Its reference is never traced, for it may be a loop; what takes its place is."""

    def run(x):
        return x * 0.5 if provider == "runs" else 1 / 0

    made = Provider("mine", run, lambda x: "not today" if provider == "refuses" else None)
    monkeypatch.setattr(kept_in_a_test, "providers", [made] * (provider != "absent"))
    context = Context("layers")
    gm = lowered(kept_in_a_test, (torch.ones(3),), FakeTensorMode(), context=context)
    targets = {node.target for node in gm.graph.nodes if node.op == "call_function"}
    assert targets == {torch.ops.aten.mul.Tensor if provider == "runs" else kept_in_a_test.overload}
    assert [note.code for note in context.notes] == ["provider-failed"] * (provider == "fails")
    assert gm(torch.ones(3))[0].eq(0.5).all()
    importlib.import_module("tunecompile.passes.lower.cleanup").PASS.run(gm.graph, context)


def test_symbols_of_one_compilation_are_traced_once(traces):
    """Code generation takes the graphs of trials, with fake values of its own."""
    mode, final = FakeTensorMode(shape_env=ShapeEnv()), Context("layers")
    contexts = Context("layers", traced=final.traced, trial=True), final, final
    graphs = [lowered(*PAIR, mode, static=False, context=context) for context in contexts]
    first, second = graphs[:2]
    assert len(traces) == 1 and len({gm.code for gm in graphs}) == 1
    assert len({id(value) for gm in graphs for value in values(gm)}) == sum(len(values(gm)) for gm in graphs)
    assert all(type(size) is torch.SymInt for value in values(second) for size in value.shape)
    torch.testing.assert_close(second(*PAIR[1][:2])[0], PAIR[0].reference(*PAIR[1]))


def test_graphs_that_have_no_meaning_elsewhere():
    """A constant is a fake tensor of a mode; a kernel of Triton is a number in a table that torch empties."""
    graph = Graph()
    graph.call_function(operator.getitem, (graph.placeholder("x"), 0))
    assert choose_provider._has_meaning_elsewhere(graph)
    with_constant = Graph()
    with_constant.get_attr("constant")
    assert not choose_provider._has_meaning_elsewhere(with_constant)
    graph.call_function(torch.ops.higher_order.triton_kernel_wrapper_functional, ())
    assert not choose_provider._has_meaning_elsewhere(graph)


def test_tables_of_references_warn_of_nothing(recwarn):
    """Such a table is a tensor of the graph, and no parameter or buffer, of which torch's graph would warn."""
    arguments = torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8), 1, 32, torch.float32
    made = lowered(dequantize_mxfp4, arguments, FakeTensorMode())
    tables = made.graph.find_nodes(op="get_attr")
    assert tables and all(table.users for table in tables), "what reads a table of the reference reads it here"
    assert not [each for each in recwarn if "get_attr" in str(each.message)]


def test_a_provider_is_told_which_results_are_read_and_which_arguments_die():
    """A matrix product, or a view of one, that the call alone reads may be overwritten."""
    graph = Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    first, second = (graph.call_function(torch.ops.aten.mm.default, (x, w)) for _ in range(2))
    view = graph.call_function(torch.ops.aten.view.default, (first, [4, 6]))
    op = gated_activation.backward_op
    total = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    node = graph.call_function(op.overload, (total, view, second, "silu"))
    results = [graph.call_function(operator.getitem, (node, place)) for place in range(2)]
    graph.output((results[1], second))
    node.meta["val"] = [torch.empty(0)] * 2

    def run(grad, gate, up, act, *, used, dying):
        return used, dying

    bound = choose_provider._bind(run, op, node)
    assert bound.keywords == {"used": (False, True), "dying": (op.parameters[1],)}
    assert choose_provider._bind(op.reference, op, node) is op.reference
    graph.erase_node(results[0])
    assert choose_provider._bind(run, op, node).keywords["used"] == (False, True)


@pytest.mark.parametrize("backward", [False, True])
def test_attention_in_a_template_keeps_its_operations(backward):
    """Launches of Triton kernels show none: attention of wide or soft-capped heads was free to the planner."""
    pytest.importorskip("triton")
    q, wide = torch.zeros(32, 2, 320, dtype=torch.bfloat16), torch.zeros(2, 32)
    asked = (q, q, q, torch.tensor([0, 20, 32], dtype=torch.int32), 20, 0.05, 0, None, True, 0.0)
    operation, arguments = varlen_attention, asked
    if backward:
        operation, arguments = varlen_attention.backward_op, (q, *asked, q, wide)
    with as_on_gpu():
        work = graph_work(lowered(operation, arguments, FakeTensorMode(shape_env=ShapeEnv())).graph)
    assert work.products == 0 and work.attention == pytest.approx((10 if backward else 4) * q.numel() * 20, rel=1e-3)


@pytest.mark.parametrize("adapted, trained", [(True, False), (False, True), (True, True)])
def test_experts_in_a_template_keep_their_operations(adapted, trained):
    """Launches of Triton kernels show none: all experts' products were free to the planner."""
    pytest.importorskip("triton")
    rows, experts, width, columns = 256, 4, 64, 96
    x, weight = torch.zeros(rows, width), torch.zeros(experts, columns, width)
    a, b = [torch.zeros(experts * 2, width)] * adapted, [torch.zeros(columns, 2 * experts)] * adapted
    bias = torch.zeros(experts, columns)
    x, weight, bias, *both = (t.bfloat16() for t in (x, weight, bias, *a, *b))
    options = (torch.zeros(experts, dtype=torch.int32), both[: len(a)], both[len(a) :], [0.5] * adapted, False, bias)
    product, mode = 2 * rows * width * columns, FakeTensorMode(shape_env=ShapeEnv())
    with as_on_gpu():
        forward = graph_work(lowered(grouped_lora_linear, (x, weight, *options), mode).graph)
        saved = (x, weight, *options, torch.zeros(rows, 16 * adapted).bfloat16())
        grad = torch.zeros(rows, columns).bfloat16()
        dead = () if trained else (1,)
        backward = graph_work(lowered(grouped_lora_linear.backward_op, (grad, *saved), mode, dead=dead).graph)
    assert forward.grouped == pytest.approx(product, rel=1e-3) and forward.products == 0
    # where weights are trained, biases are, too, as sums of 8 columns; and torch multiplies in place of the template
    assert backward.grouped >= (1 + trained) * product * 0.999
    assert backward.grouped + backward.products <= (1 + trained) * product + 2 * rows * 8 * columns


def test_why_a_provider_was_chosen():
    """What it gains; of the reference, who refused."""
    providers = importlib.import_module("tunecompile.passes.plan.providers")
    fast = Provider("fast", lambda x: x / 2, lambda x: "too small", because="one kernel")
    alone = dataclasses.replace(halved_in_a_test, providers=[fast])
    assert providers._reason(alone, fast, [torch.ones(1)]) == "one kernel"
    assert providers._reason(alone, alone.fallback(), [torch.ones(1)]) == "fast: too small"


@pytest.mark.parametrize("precision", [None, "fp8"])
def test_plain_products_are_told_of_where_a_precision_was_asked_for(precision):
    providers = importlib.import_module("tunecompile.passes.plan.providers")
    graph = Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.mm.default, (x, x))
    for each in (x, node):
        each.meta["val"] = torch.empty(32, 32)
    graph.output(node)
    context = Context("layers", precision=precision)
    providers.run(graph, context)
    assert [each.code for each in context.notes] == ["products-not-in-precision"] * (precision is not None)
