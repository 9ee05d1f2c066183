"""Products that read tokens where they stand. Kernels need a GPU: here the meaning of each op stands in for them."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.fx import Graph

from tests.support.passes.run import assert_same, random, results
from tunecompile.compiler.backend import Backend
from tunecompile.compiler.pass_manager import Pass
from tunecompile.ir.op import Provider
from tunecompile.ops import adapted_stack, collect_rows, gathered_lora_linear, gathered_lora_linear_backward, sum_rows
from tunecompile.passes import PIPELINE
from tunecompile.passes.lower import gather_rows

EXPERTS, CHOICES, TOKENS, WIDTH, INNER = 4, 2, 12, 16, 8
READ_IN_PLACE = (gathered_lora_linear, gathered_lora_linear_backward, sum_rows)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Each op has a kernel of its own."""
    for op in READ_IN_PLACE:

        def run(*args, op=op, **told):
            return op.reference(*args)

        monkeypatch.setattr(op, "providers", [Provider("kernel", run, lambda *_: None)])


def test_what_nothing_reads_is_erased_if_it_changes_nothing():
    """A chain of a gather and its cast; not what is read, and no call of others, which may write."""
    graph, aten = Graph(), torch.ops.aten
    x, index = graph.placeholder("x"), graph.placeholder("index")
    gather = graph.call_function(collect_rows.overload, (x, index))
    graph.call_function(aten._to_copy.default, (gather,), {"dtype": torch.float32})
    read = graph.call_function(collect_rows.overload, (x, index))
    write = graph.call_function(aten.copy_.default, (x, read))
    graph.output(())
    gather_rows._erase_unread(graph)
    assert [node for node in graph.nodes if node.op == "call_function"] == [read, write]
    assert len(graph.find_nodes(op="placeholder")) == 2


@pytest.fixture
def ran():
    """How often each op is in the lowered graphs. (Its kernel's graph is traced once for equal calls.)"""
    return Counter()


def counting(seen):
    """The passes, and one that counts the ops."""

    def run(graph, context):
        seen.update(op.name for node in graph.nodes for op in READ_IN_PLACE if node.target is op.overload)

    after = PIPELINE.index(gather_rows.PASS) + 1
    return [*PIPELINE[:after], Pass("counting", "lower", run), *PIPELINE[after:]]


def stacks(dtype, adapted):
    def draw(*shape, grad=False):
        return random(*shape, dtype=dtype, grad=grad, scale=0.3)

    weights = draw(EXPERTS, INNER, WIDTH), draw(EXPERTS, WIDTH, INNER)
    if not adapted:
        return weights
    return *weights, draw(EXPERTS * 3, WIDTH, grad=True), draw(INNER, 3 * EXPERTS, grad=True)


def layer(sums):
    """A layer of experts that adds up its rows in a dtype, with adapters on its first product where there are some."""

    def run(x, chosen, weights, up, down, a=None, b=None):
        ids, order = torch.sort(chosen.reshape(-1))
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        stack = up if a is None else adapted_stack(up, [a], [b], [2.0], False)
        rows = x[order // CHOICES]
        hidden = torch._grouped_mm(rows, stack.transpose(-2, -1), offs=ends).relu()
        hidden = hidden * weights.reshape(-1)[order].unsqueeze(-1)
        made = torch._grouped_mm(hidden, down.transpose(-2, -1), offs=ends)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.size(0))
        return made[places].view(TOKENS, CHOICES, -1).sum(dim=1, dtype=sums)

    return run


@pytest.mark.parametrize("sums", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_layer(ran, adapted, sums):
    torch.manual_seed(0)
    args = (
        random(TOKENS, WIDTH, dtype=torch.bfloat16, grad=True),
        torch.randint(EXPERTS, (TOKENS, CHOICES)),
        random(TOKENS, CHOICES, dtype=torch.bfloat16, grad=True),
        *stacks(torch.bfloat16, adapted),
    )
    backend = Backend("test", counting(ran), "eager")
    torch._dynamo.reset()
    got = results(torch.compile(layer(sums), backend=backend), args)
    want = results(layer(sums), args)
    assert_same(got[0] + got[1], want[0] + want[1], 1.5e-2)
    assert not backend.failures
    # the first product reads tokens, in its backward too; the second one's gradient is read where the tokens' stands;
    # sums are those of the rows that come back, of the gradients of those that went, and of the weights' (of one each)
    assert ran == {"gathered_lora_linear": 1, "gathered_lora_linear_backward": 2, "sum_rows": 3}


def test_where_no_kernel_runs_it_nothing_changes(ran, monkeypatch):
    for op in READ_IN_PLACE:
        monkeypatch.setattr(op, "providers", [replace(p, refuses=lambda *_: "no") for p in op.providers])
    args = (random(TOKENS, WIDTH, dtype=torch.bfloat16, grad=True), torch.randint(EXPERTS, (TOKENS, CHOICES)))
    args = (*args, random(TOKENS, CHOICES, dtype=torch.bfloat16), *stacks(torch.bfloat16, False))
    torch._dynamo.reset()
    got = results(torch.compile(layer(None), backend=Backend("test", counting(ran), "eager")), args)
    want = results(layer(None), args)
    assert_same(got[0] + got[1], want[0] + want[1], 1.5e-2)
    assert not ran
