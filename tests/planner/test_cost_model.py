"""What small graphs multiply, read and write, counted by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tunecompile.ir.op import OPS
from tunecompile.planner.cost_model import GAP, GROUPED, RIDGE, SUSTAINED, Work, beside_layers, flops, graph_work
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


def test_milliseconds():
    done = Work(products=870, attention=87, traffic=50, kernels=2)
    plain = Rates(flops=100.0, copy=1.0, bandwidth=10.0, attention=10.0)
    assert done.math_ms(plain) == pytest.approx((8.7 + 8.7) / SUSTAINED)
    assert done.ms(plain, scale=2.0) == pytest.approx(2 * (done.math_ms(plain) + 5.0))
    gapped = Rates(100.0, 1.0, 10.0, 10.0, launches=True)
    assert done.ms(gapped) == pytest.approx(done.ms(plain) + 2 * GAP)
    assert done + Work(1, 1, 1, 1) == Work(871, 88, 51, 3) and done.flops == 957


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
@pytest.mark.parametrize("name", ["varlen_attention", "attention_in_rows"])
def test_our_ops_of_documents_count_alike(name, window, keys):
    """Their arguments stand in another order than those of flash attention."""
    graph = torch.fx.Graph()
    q, k, v, offsets, out = (graph.placeholder(name) for name in ("q", "k", "v", "offsets", "out"))
    for node, shape in ((q, (64, 4, 16)), (k, (64, 2, 16)), (v, (64, 2, 16)), (offsets, (5,)), (out, (64, 4, 16))):
        node.meta["val"] = torch.empty(shape, device="meta")
    asked = (q, k, v, offsets, 10, 0.25, window, None, True, 0.0)
    ours = {op.name: op.overload for op in OPS.values()}
    forward = graph.call_function(ours[name], asked)
    backward = graph.call_function(ours[f"{name}_backward"], (out, *asked, out, q))
    assert (flops(forward), flops(backward)) == (4 * 64 * 4 * 16 * keys, 10 * 64 * 4 * 16 * keys)
