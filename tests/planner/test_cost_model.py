"""What small graphs multiply, read and write, counted by hand."""

from operator import getitem

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from tunecompile.ir.op import OPS, Cost, aten_name
from tunecompile.ops.experts.grouped_linear import grouped_lora_linear
from tunecompile.ops.lora import lora_linear
from tunecompile.ops.swiglu import gated_activation
from tunecompile.planner.cost_model import (
    GAP,
    GROUPED,
    INTEGERS,
    RIDGE,
    SUSTAINED,
    Work,
    beside_layers,
    document_attention,
    flops,
    graph_work,
    node_cost,
    share_flops,
)
from tunecompile.planner.hardware import Rates

N = 64
SQUARE = N * N * 4
PRODUCT = 2 * N**3
WAITED = 3 * SQUARE - PRODUCT // RIDGE  #: of a product as small as these


def of(fn, *values):
    return graph_work(make_fx(fn, tracing_mode="fake")(*(values or [torch.randn(N, N) for _ in range(2)])).graph)


def test_a_product_of_few_operations_a_byte_waits_for_memory():
    assert of(lambda a, b: a @ b) == Work(PRODUCT, traffic=WAITED, kernels=1)
    large = of(lambda a, b: a @ b, *torch.empty(2, 1024, 1024, dtype=torch.bfloat16, device="meta"))
    assert large == Work(2 * 1024**3, traffic=0, kernels=1)


def test_a_matrix_that_is_added_is_copied_to_the_output_first():
    row, *squares = torch.randn(N), *torch.randn(3, N, N)
    assert of(torch.addmm, *squares) == Work(PRODUCT, traffic=WAITED + 3 * SQUARE, kernels=2)
    assert of(torch.addmm, row, *squares[1:]) == Work(PRODUCT, traffic=WAITED + row.nbytes, kernels=1)


def test_fused_code_reads_and_writes_once():
    assert of(lambda a, b: ((a + b).relu() * a).sigmoid()) == Work(traffic=3 * SQUARE, kernels=1)
    assert of(lambda a, b: (a + b, a * b)) == Work(traffic=4 * SQUARE, kernels=1)


def test_between_two_calls_it_is_read_again():
    found = of(lambda a, b: (a + b) @ b * a)
    assert found == Work(PRODUCT, traffic=3 * SQUARE + WAITED + 3 * SQUARE, kernels=3)


def test_views_move_nothing():
    assert of(lambda a, b: (a.t() @ b.view(N, N)).unsqueeze(0)) == of(lambda a, b: a @ b)


def test_memory_that_is_only_reserved_costs_nothing():
    assert of(lambda a, b: (torch.empty_like(a), a @ b)) == of(lambda a, b: a @ b)


def test_attention_counts_by_itself():
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))

    def step(q, k, v):
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), (q, k, v))

    found = of(step, q, k, v)
    assert found.attention == 7 * 2 * (2 * 16 * 16 * 8) and found.products == 0
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(1, 2, 16, 8)
    graph.call_function(torch.ops.aten._scaled_dot_product_flash_attention.default, (x, x, x))
    assert graph_work(graph) == Work(attention=2 * 2 * (2 * 16 * 16 * 8), kernels=1), "it waits for no memory"


def test_which_calls_are_dear_to_recompute():
    """Products and attention. Of a backward the partitioner decides by itself."""
    q = torch.randn(1, 2, 16, 8, requires_grad=True)

    def step(q, bias):
        made = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return torch.autograd.grad((made @ made.mT + bias).sum(), q)

    graph = make_fx(step, tracing_mode="fake")(q, torch.randn(16, 16)).graph
    dear = {aten_name(node.target) for node in graph.nodes if node_cost(node) is Cost.MATMUL}
    assert dear == {"_scaled_dot_product_flash_attention_for_cpu", "bmm"}
    assert all(node_cost(node) in (Cost.MATMUL, None) for node in graph.nodes)
    assert node_cost(Graph().call_function(gated_activation.overload, ())) is Cost.POINTWISE


def test_experts_products_take_their_own_rate():
    graph = Graph()
    for name, shape in (("x", (48, 8)), ("w", (3, 8, 32)), ("ends", (3,))):
        graph.placeholder(name).meta["val"] = torch.empty(shape)
    call = graph.call_function(torch.ops.aten._grouped_mm.default, tuple(graph.nodes))
    call.meta["val"] = torch.empty(48, 32)
    moved, multiplied = 4 * (48 * 8 + 3 * 8 * 32 + 3 + 48 * 32), 2 * 48 * 8 * 32
    assert graph_work(graph) == Work(grouped=multiplied, traffic=moved - multiplied // RIDGE, kernels=1)


def test_products_in_fp8_have_twice_the_rate():
    graph = Graph()
    for name in ("a", "b"):
        value = torch.empty(N, N, dtype=torch.float8_e4m3fn, device="meta")
        graph.placeholder(name).meta["val"] = value.t() if name == "b" else value
    for name in ("of_a", "of_b"):
        graph.placeholder(name).meta["val"] = torch.empty((), device="meta")
    given = tuple(graph.nodes)
    call = graph.call_function(torch.ops.aten._scaled_mm.default, given, {"out_dtype": torch.bfloat16})
    call.meta["val"] = torch.empty(N, N, dtype=torch.bfloat16, device="meta")
    moved = 4 * N * N + 8 - PRODUCT // RIDGE
    assert graph_work(graph) == Work(PRODUCT // 2, traffic=moved, kernels=1)


def test_milliseconds():
    done = Work(products=870, attention=87, traffic=50, kernels=2)
    plain = Rates(flops=100.0, copy=1.0, bandwidth=10.0, attention=10.0)
    assert done.math_ms(plain) == pytest.approx((8.7 + 8.7) / SUSTAINED)
    assert done.ms(plain, scale=2.0) == pytest.approx(2 * (done.math_ms(plain) + 5.0))
    assert done.ms(plain) == pytest.approx(done.math_ms(plain) + 5.0)
    gapped = Rates(100.0, 1.0, 10.0, 10.0, launches=True)
    assert done.ms(gapped) == pytest.approx(done.ms(plain) + 2 * GAP)
    assert done + Work(1, 1, 1, 1) == Work(871, 88, 51, 3) and done.flops == 957


def test_shares_are_those_of_whole_steps():
    """Of an H200, of an H100's 791 TFLOP/s, and operations a byte that hide what an H200's products read."""
    rates = Rates(791e9, 55e6, launches=True)
    assert 3.5 <= Work(kernels=1000).ms(rates) <= 4.0 and RIDGE == pytest.approx(690 / 4.1, rel=0.1)
    assert 1 / 0.97 <= Work(products=791 * 10**9).math_ms(rates) <= 1 / 0.90
    assert 450e9 < 1e12 / (SUSTAINED * Work(grouped=10**12).math_ms(rates)) < 530e9


def test_grouped_products_take_longer_than_others():
    plain, work = Rates(flops=100.0, copy=1.0), Work(grouped=650)
    assert work.math_ms(plain) == pytest.approx(6.5 / GROUPED / SUSTAINED)
    assert (work + Work(100, grouped=50)).flops == 800


@pytest.mark.parametrize("left, right", [((48, 8), (3, 8, 32)), ((8, 48), (48, 32)), ((3, 16, 8), (8, 96))])
def test_grouped_products_of_torch_count(left, right):
    """torch's counter knows nothing of them: experts that are trained were multiplied in no time."""
    node = called(torch.ops.aten._grouped_mm.default, [left, right, (3,)])
    rows = {2: 48, 3: 16 * 3}[len(left)] if left != (8, 48) else 48
    assert flops(node) == 2 * rows * 8 * 32


def test_head_loss_and_optimizer():
    head, trained = torch.empty(1000, 8), torch.empty(100, requires_grad=True)
    assert beside_layers([head], [trained], tokens=10) == Work(
        products=4 * 10 * 8000, traffic=2 * 4 * 10 * 1000 + 7 * 400
    )
    assert beside_layers([head.requires_grad_()], [], tokens=10).products == 6 * 10 * 8000


def called(op, shapes, *values, **asked):
    """A node that calls an op with tensors of these shapes, and values behind them."""
    graph = torch.fx.Graph()
    given = [shape if shape is None else graph.placeholder(f"x{at}") for at, shape in enumerate(shapes)]
    for node, shape in zip(given, shapes):
        if node is not None:
            node.meta["val"] = torch.empty(shape, device="meta")
    return graph.call_function(op, (*given, *values), asked)


@pytest.mark.parametrize("window, keys", [(None, 10), (3, 4), (0, 1), (-1, 10)])
def test_attention_of_documents_counts_the_longest_and_windows(window, keys):
    shapes = [(64, 4, 16), (64, 2, 16), (64, 2, 16), (5,), (5,)]
    op, asked = torch.ops.aten._flash_attention_forward.default, {} if window is None else {"window_size_left": window}
    assert flops(called(op, shapes, 10, 10, 0.0, True, False, **asked)) == 4 * 64 * 4 * 16 * keys
    saved = [(64, 4, 16), (4, 64), (5,), (5,)]
    op, rest = torch.ops.aten._flash_attention_backward.default, (12, 10, 0.0, True, None, None)
    assert flops(called(op, [shapes[0], *shapes[:3], *saved], *rest, **asked)) == 10 * 64 * 4 * 16 * keys


def test_attention_of_documents_whose_longest_is_not_by_position_counts_all_keys():
    shapes = [(64, 4, 16), (64, 2, 16), (64, 2, 16), (5,), (5,)]
    op, asked = torch.ops.aten._flash_attention_forward.default, dict(max_k=10, dropout_p=0.0, is_causal=True)
    node = called(op, shapes, 10, **asked, return_debug_mask=False)
    assert flops(node) == 4 * 64 * 4 * 16 * 64


def test_attention_of_rows_has_no_longest_document():
    """What its backward is given at that place is the rate of dropout."""
    rows = (2, 4, 16, 8)
    op = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    node = called(op, [rows, rows, rows, rows, None, rows, (2, 4, 16), (), ()], 0.0, [True, True, True, False], True)
    assert flops(node) == 10 * (2 * 4 * 16 * 8) * 16


@pytest.mark.parametrize("window, keys", [(0, 10), (4, 4)])
def test_our_attention_of_documents_counts_alike(window, keys):
    """Its arguments stand in another order than those of flash attention."""
    graph = torch.fx.Graph()
    q, k, v, offsets, out = (graph.placeholder(name) for name in ("q", "k", "v", "offsets", "out"))
    for node, shape in ((q, (64, 4, 16)), (k, (64, 2, 16)), (v, (64, 2, 16)), (offsets, (5,)), (out, (64, 4, 16))):
        node.meta["val"] = torch.empty(shape, device="meta")
    asked = (q, k, v, offsets, 10, 0.25, window, None, True, 0.0)
    ours = {op.name: op.overload for op in OPS.values()}
    forward = graph.call_function(ours["varlen_attention"], asked)
    backward = graph.call_function(ours["varlen_attention_backward"], (out, *asked, out, q))
    assert (flops(forward), flops(backward)) == (4 * 64 * 4 * 16 * keys, 10 * 64 * 4 * 16 * keys)
    assert document_attention(graph) == (10, window)
    graph.call_function(ours["varlen_attention"], (q, k, v, offsets, 10, 0.25, 3, None, True, 0.0))
    assert document_attention(graph) == (0, 0), "layers with both have no window of their own"


LAUNCH = torch.ops.higher_order.triton_kernel_wrapper_functional
MATRIX = 2 * 16 * 8 * 4  #: operations of `mm` below
ADAPTED = 2 * 16 * 8 * 12  #: of the adapted linear


class Lowered:
    """A graph with an op's call, and what it became."""

    def __init__(self):
        self.graph = Graph()

    def input(self, *shape):
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        node.meta["val"] = torch.empty(shape)
        return node

    def launch(self, **given):
        """A launch with tensors of so many bytes; a node stands for itself."""
        tensors = {n: self.input(v // 4) if isinstance(v, int) else v for n, v in given.items()}
        return self.graph.call_function(LAUNCH, (), {"kernel_idx": 0, "kwargs": {**tensors, "width": 7}})

    def product(self):
        node = self.graph.call_function(torch.ops.aten.mm.default, (self.input(16, 8), self.input(8, 4)))
        node.meta["val"] = torch.empty(16, 4)
        return node

    def adapted(self):
        x, w, a, b = (self.input(*shape) for shape in ((16, 8), (12, 8), (2, 8), (12, 2)))
        return self.graph.call_function(lora_linear.overload, (x, [], [w], [], [a], [b], [1.0], torch.float32, "dense"))


def work_of(node):
    """The work of one launch, in a graph of its own."""
    alone = Graph()
    given = {name: alone.placeholder(name) for name in node.kwargs["kwargs"]}
    for name, value in given.items():
        value.meta["val"] = getattr(node.kwargs["kwargs"][name], "meta", {}).get("val")
    alone.call_function(LAUNCH, (), {"kwargs": given}).meta.update(node.meta)
    return graph_work(alone)


def test_launches_share_what_products_beside_them_leave():
    """By bytes; what is left over by rounding is the last one's, and no operation is lost."""
    lowered = Lowered()
    call, beside = lowered.adapted(), lowered.product()
    first, last = lowered.launch(x=4000, y=4000), lowered.launch(x=4000)
    assert flops(call) == ADAPTED
    share_flops(call, [beside, first, last])
    rest = ADAPTED - MATRIX
    assert rest % 3, "a case that has to be rounded"
    assert work_of(first) == Work(rest * 2 // 3, traffic=8000 - rest * 2 // 3 // RIDGE, kernels=1)
    assert work_of(last).products == rest - rest * 2 // 3
    alone = lowered.launch(x=4000)
    share_flops(call, [lowered.product(), lowered.product(), lowered.product(), lowered.product(), alone])
    assert work_of(alone) == Work(traffic=4000, kernels=1), "nothing is left to it"


def test_products_of_integers_are_counted_at_their_rate():
    lowered = Lowered()
    rows = lowered.input(4, 8)
    rows.meta["val"] = torch.empty(4, 8, dtype=torch.int8)
    count = lowered.graph.placeholder("count")
    count.meta["val"] = 4  # a size
    launch = lowered.launch(a=rows, count=count)
    share_flops(lowered.adapted(), [launch])
    assert work_of(launch).products == round(ADAPTED / INTEGERS)


def test_a_tensor_that_a_launch_is_given_twice_moves_once():
    lowered = Lowered()
    both = lowered.input(1000)
    lowered.launch(x=both, y=both)
    assert graph_work(lowered.graph) == Work(traffic=4000, kernels=1)


def test_a_launch_that_multiplies_long_enough_hides_what_it_reads():
    lowered = Lowered()
    launch = lowered.launch(x=ADAPTED // RIDGE // 4 * 4)
    share_flops(lowered.adapted(), [launch])
    assert work_of(launch) == Work(ADAPTED, kernels=1)


def test_grouped_products_and_attention_are_counted_as_such():
    lowered = Lowered()
    x, weight, offsets = lowered.input(16, 8), lowered.input(3, 12, 8), lowered.input(3)
    call = lowered.graph.call_function(grouped_lora_linear.overload, (x, weight, offsets, [], [], [], False, None))
    launch = lowered.launch(x=4000)
    share_flops(call, [launch])
    assert work_of(launch) == Work(grouped=2 * 16 * 8 * 12, traffic=4000 - 2 * 16 * 8 * 12 // RIDGE, kernels=1)
    ours = next(op.overload for op in OPS.values() if op.name == "varlen_attention")
    q, k, v = (lowered.input(64, 2, 16) for _ in range(3))
    call = lowered.graph.call_function(ours, (q, k, v, lowered.input(5), 10, 0.25, 0, None, True, 0.0))
    launch = lowered.launch(x=4000)
    share_flops(call, [launch])
    assert work_of(launch) == Work(attention=4 * 64 * 2 * 16 * 10, kernels=1), "it waits for no memory"


def test_other_ops_launch_nothing_that_multiplies():
    lowered = Lowered()
    launch = lowered.launch(x=4000)
    gate = lowered.graph.call_function(gated_activation.overload, (lowered.input(16, 8), lowered.input(16, 8), "silu"))
    share_flops(gate, [launch])
    assert work_of(launch) == Work(traffic=4000, kernels=1)
    share_flops(lowered.adapted(), [lowered.product()])  # without a launch there is none to note it on


def test_between_launches_fused_code_reads_again():
    """What one wrote into memory, the next kernel has to read."""
    lowered = Lowered()
    x = lowered.input(1000)

    def add():
        node = lowered.graph.call_function(torch.ops.aten.add.Tensor, (x, 1))
        node.meta["val"] = torch.empty(1000)
        return node

    read = [add(), add()]
    launch = lowered.launch(x=1000)
    read += [add()]
    lowered.graph.output(tuple(read))
    assert graph_work(lowered.graph) == Work(traffic=3 * 4000 + 1000 + 2 * 4000, kernels=3)
    lowered.graph.erase_node(launch)
    assert graph_work(lowered.graph) == Work(traffic=4 * 4000, kernels=1)


def test_a_backward_multiplies_only_for_the_gradients_that_are_read():
    """An op is told which of its results are: frozen experts need no gradient of theirs."""
    lowered = Lowered()
    shapes = (16, 12), (16, 8), (3, 12, 8), (3,)
    grad, x, weight, offsets = (lowered.input(*shape) for shape in shapes)
    given = (grad, x, weight, offsets, [], [], [], False, None, lowered.input(16, 0))
    call = lowered.graph.call_function(grouped_lora_linear.backward_op.overload, given)
    call.meta["val"] = [torch.empty(16, 8), torch.empty(3, 12, 8)]
    results = [lowered.graph.call_function(getitem, (call, at)) for at in range(2)]
    lowered.graph.output((results[0],))
    assert flops(call) == 2 * 16 * 8 * 12
    lowered.graph.output_node().args = (tuple(results),)
    assert flops(call) == 2 * 2 * 16 * 8 * 12
