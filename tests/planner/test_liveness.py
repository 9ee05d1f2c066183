"""Bytes at the peak of small graphs, counted by hand."""

from operator import getitem

import torch
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from tunecompile.planner import liveness
from tunecompile.planner.liveness import _member, extent, tensor_bytes, workspace

N = 64
SQUARE = N * N * 4


def test_what_a_kernel_writes_is_where_it_is_written():
    """A result of a Triton kernel's call is known by the argument's name; inputs are not of this graph's memory."""
    graph = Graph()
    given, made = graph.placeholder("given"), graph.call_function(torch.neg, (graph.placeholder("x"),))
    arguments = {"first": made, "second": given, "third": 3}
    call = graph.call_function(torch.sin, (), {"kwargs": arguments})
    results = {name: graph.call_function(getitem, (call, name)) for name in (*arguments, "fourth")}
    roots = {made: "memory", given: None}
    found = {name: _member(node, roots) for name, node in results.items()}
    assert found.pop("first") == "memory" and found == {name: results[name] for name in found}
    assert _member(results["first"], {}) is results["first"], "nothing is known of where it stands"


def peak(fn, count=2):
    values = [torch.randn(N, N) for _ in range(count)]
    return extent(make_fx(fn)(*values).graph)


def test_inputs_do_not_count_and_what_is_returned_does():
    assert peak(lambda a, b: a @ b).peak == peak(lambda a, b: a @ b).returned == SQUARE


def test_fused_code_needs_no_memory():
    assert peak(lambda a, b: ((a + b).relu() * 2).sigmoid()).peak == SQUARE


def test_a_product_waits_for_its_reader():
    assert peak(lambda a, b: ((a @ b) @ b) @ a).peak == 2 * SQUARE  # one read, one written


def test_the_operand_of_a_product_is_in_memory():
    assert peak(lambda a, b: (a + b) @ b).peak == 2 * SQUARE


def test_a_value_lives_until_its_last_reader_through_what_is_fused():
    def fn(a, b):
        first = a @ b
        late = first * 2  # fused into the sum at the end, which reads `first`
        second = (a @ a) @ b
        return second + late

    assert (
        peak(fn).peak == 3 * SQUARE
    )  # first, and a product with its operand; the result takes the place of what was freed


def test_views_are_no_memory_of_their_own_and_keep_the_whole_alive():
    def fn(a, b):
        whole = a @ b
        part = whole.t()[:1]
        other = (a @ a) @ b
        return other, part @ b

    assert peak(fn).peak == 3 * SQUARE  # whole, a product and its operand


def test_a_value_without_users_is_freed_at_once():
    assert peak(lambda a, b: (a @ b, (a @ a).sum())[1]).peak < 2.1 * SQUARE


def test_a_product_is_written_where_a_concatenation_stands():
    def fn(a, b):
        wide = torch.cat([a @ b, torch.full((N, N), 0.0)], 1)
        return wide @ wide.t()

    assert peak(fn).peak == 3 * SQUARE  # two for what is concatenated, one for the product


def test_two_products_are_written_where_they_are_concatenated_and_those_of_batches_are_copied():
    def squares(fn):
        return peak(lambda a, b: torch.cat([fn(a, b), fn(a, a)], -1).sum()).peak // SQUARE

    assert squares(torch.mm) == 2
    assert squares(lambda a, b: torch.bmm(a[None], b[None])) == 4


def test_a_product_of_another_shape_is_copied_into_a_concatenation():
    def fn(a, b):
        wide = torch.cat([(a @ b).view(1, N, N), torch.full((1, N, N), 0.0)], 2)
        return wide[0] @ wide[0].t()

    assert (
        peak(fn).peak == 3 * SQUARE
    )  # the product, and two for what is concatenated; the last product takes the place of the first


def test_a_product_that_others_read_is_copied_into_a_concatenation():
    def fn(a, b):
        first = a @ b
        wide = torch.cat([first, torch.full((N, N), 0.0)], 1)
        return wide @ wide.t(), first @ b

    assert peak(fn).peak == 4 * SQUARE


def test_what_is_returned_lives_to_the_end():
    def fn(a, b):
        first = a @ b
        return first, (a @ a) @ b

    assert peak(fn).peak == 3 * SQUARE  # `first`, and a product with its operand


def test_code_that_is_fused_through_a_view_needs_no_memory():
    """Unless what reads the view does."""

    def halves(a, b):
        return torch.cat([half * 2 for half in (a + b).split(N // 2)])

    assert peak(halves).peak == SQUARE and peak(lambda a, b: (a + b).t() * 2).peak == SQUARE
    assert peak(lambda a, b: (a + b).t() @ b).peak == 2 * SQUARE
    assert peak(lambda a, b: torch.cat([half @ b for half in (a + b).split(N // 2)])).peak == 2 * SQUARE


def test_what_a_kernel_reads_lives_until_its_call():
    """Also where its results are in a buffer that was there before."""
    graph = Graph()
    given = graph.placeholder("given")
    read, written, other = (graph.call_function(torch.ops.aten.mm.default, (given, given)) for _ in range(3))
    call = graph.call_function(torch.sin, (), {"kwargs": {"out": written, "x": read}})
    result = graph.call_function(getitem, (call, "out"))
    graph.output((result, other))
    for node in graph.nodes:
        node.meta["val"] = {} if node is call else torch.empty(N, N)
    assert extent(graph).pieces == (SQUARE, SQUARE) and extent(graph).peak == 3 * SQUARE
    with graph.inserting_before(other):
        early = graph.call_function(torch.sin, (), {"kwargs": {"out": written, "x": read}})
    early.meta["val"] = {}
    call.replace_all_uses_with(early)
    graph.erase_node(call)
    assert extent(graph).peak == 2 * SQUARE


def test_the_backward_of_attention_needs_more_than_its_results(monkeypatch):
    """dq is summed in fp32, and dk and dv are there for each head of q where heads share keys. On a CPU it is not known."""

    def attention(heads, name):
        graph = Graph()
        values = [torch.empty(2, count, 8, 4) for count in (4, 4, heads, heads)]
        nodes = [graph.placeholder(f"x{i}") for i in range(4)]
        for node, value in zip(nodes, values):
            node.meta["val"] = value
        return graph.call_function(getattr(torch.ops.aten, name).default, tuple(nodes))

    forward, backward = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"
    assert workspace(attention(4, backward)) == 0
    monkeypatch.setattr(liveness, "on_gpu", lambda tensor: True)
    elements = 2 * 4 * 8 * 4
    assert workspace(attention(4, backward)) == elements * (4 + 4)
    assert workspace(attention(2, backward)) == elements * (4 + 3 * 4)
    assert workspace(attention(4, forward)) == 0 == workspace(Graph().call_function(torch.ops.aten.mm.default, ()))


def test_each_result_of_a_call_is_in_memory_of_its_own():
    """As long as it is read, and no longer."""

    def fn(a, b):
        values, places = a.topk(N // 2)
        return values @ values.t(), (places + 1) @ places.t()

    half = SQUARE // 2
    found = peak(fn)
    assert found.pieces == (2 * SQUARE, SQUARE), "whole numbers have 8 bytes"
    assert found.peak == 2 * half + 2 * half + SQUARE + 2 * SQUARE
    assert tensor_bytes(None) == tensor_bytes(3) == 0


def test_workspace_is_there_beside_the_gradients_and_what_is_live(monkeypatch):
    """Gradients of q, k and v; that of a bias is not made then."""
    monkeypatch.setattr(liveness, "on_gpu", lambda tensor: True)
    graph, x = Graph(), torch.empty(2, 4, 8, 4)
    given = [graph.placeholder(name) for name in ("grad", "q", "k", "v")]
    early = graph.call_function(torch.ops.aten.mm.default, tuple(given[:2]))
    call = graph.call_function(torch.ops.aten._scaled_dot_product_efficient_attention_backward.default, tuple(given))
    results = [graph.call_function(getitem, (call, place)) for place in range(3)]
    graph.output((*results, early))
    for node in graph.nodes:
        node.meta["val"] = (x, x, x, torch.empty(1000)) if node is call else x
    assert extent(graph).peak == x.nbytes + 3 * x.nbytes + workspace(call) == 4 * x.nbytes + 256 * 8
