"""Attention's backward on a few heads at a time gives the gradients of all at once."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tunecompile._torch.cuda import attention_order
from tunecompile.compiler.pass_manager import Context
from tunecompile.ir.pretend_gpu import as_on_gpu
from tunecompile.passes.lower import attention_by_heads as by_heads
from tunecompile.planner.cost_model import graph_work
from tunecompile.planner.liveness import extent

SIZES = pytest.mark.parametrize(
    "batch, heads, kv_heads, length, dim", [(1, 8, 8, 17, 16), (2, 6, 6, 1, 8), (3, 4, 4, 33, 32)]
)


def backward(device, batch, heads, kv_heads, length, dim, dtype=torch.float32, dropout=0.0, causal=True, strided=True):
    """The graph of attention's gradients, and inputs for it."""
    torch.manual_seed(0)

    def tensor(count):
        return (
            torch.randn(batch, length, count, dim, device=device, dtype=dtype).transpose(1, 2)
            if strided
            else torch.randn(batch, count, length, dim, device=device, dtype=dtype)
        )

    def gradients(q, k, v, grad):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(
            *inputs, dropout_p=dropout, is_causal=causal, scale=0.3, enable_gqa=heads != kv_heads
        )
        return torch.autograd.grad(out, inputs, grad)

    inputs = tensor(heads), tensor(kv_heads), tensor(kv_heads), tensor(heads)
    return make_fx(gradients, tracing_mode="fake")(*inputs), inputs


def calls(graph):
    return [node for node in graph.nodes if "attention" in str(node.target) and "backward" in str(node.target)]


def split(gm):
    by_heads.PASS.run(gm.graph, Context("layer"))
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    return gm


@pytest.fixture
def scarce(monkeypatch):
    """Two heads of k are all there is room for, on any device."""
    monkeypatch.setattr(by_heads, "workspace", lambda node: by_heads.bound_arguments(node)["key"].meta["val"].shape[1])
    allow(monkeypatch, 2)


def allow(monkeypatch, room):
    monkeypatch.setattr(by_heads, "ROOM", room)
    monkeypatch.setattr(by_heads, "EACH", room)


@SIZES
@pytest.mark.parametrize("strided", [True, False])
def test_the_same_gradients_laid_out_the_same_way(scarce, strided, batch, heads, kv_heads, length, dim):
    gm, inputs = backward("cpu", batch, heads, kv_heads, length, dim, strided=strided)
    whole = gm(*inputs)
    assert len(calls(gm.graph)) == 1 and len(calls(split(gm).graph)) == heads // 2
    for one, other in zip(gm(*inputs), whole):
        assert torch.equal(one, other) and one.stride() == other.stride()


def of_one_product(x, grad):
    q, k, v = (part.view(2, 9, -1, 8).transpose(1, 2) for part in x.split([48, 48, 48], -1))
    out, *saved = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q * 2, k * 2, v, 0.0, True)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q * 2, k * 2, v, out, *saved, 0.0, True
    )


OF_ONE_PRODUCT = torch.randn(2, 9, 144), torch.randn(2, 6, 9, 8)


def test_a_view_of_something_larger_is_read_from_memory_of_its_own(scarce):
    inputs = OF_ONE_PRODUCT
    gm = make_fx(of_one_product, tracing_mode="fake")(*inputs)
    whole = gm(*inputs)
    (copy,) = [
        node
        for node in split(gm).graph.nodes
        if node.target is torch.ops.aten.clone.default and node.meta["val"].dim() == 4
    ]
    assert copy.args[0].target is torch.ops.aten.transpose.int
    assert all(torch.equal(one, other) for one, other in zip(gm(*inputs), whole))


def test_what_is_not_by_head_alone_stays_whole(scarce):
    gm, _ = backward("cpu", 1, 7, 7, 16, 16)
    assert len(calls(split(gm).graph)) == 7  # no divisor between

    def masked(q, mask, grad):
        q = q.detach().requires_grad_()
        return torch.autograd.grad(F.scaled_dot_product_attention(q, q, q, mask), q, grad)

    q = torch.randn(1, 4, 8, 16)
    gm = make_fx(masked, tracing_mode="fake")(q, torch.zeros(8, 8), q)
    before = len(calls(gm.graph))
    assert len(calls(split(gm).graph)) == before


GPU = [("cudnn", 1, 8, 2, 4096, 128), ("flash", 2, 8, 4, 512, 64), ("cudnn", 2, 32, 8, 1024, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel, batch, heads, kv_heads, length, dim", GPU)
def test_vendors_kernels(kernel, batch, heads, kv_heads, length, dim, monkeypatch):
    with attention_order([kernel]):
        gm, inputs = backward("cuda", batch, heads, kv_heads, length, dim, torch.bfloat16)
        whole = gm(*inputs)
        (call,) = calls(gm.graph)
        allow(monkeypatch, -(-by_heads.workspace(call) // 2))
        assert kernel in str(call.target) and len(calls(split(gm).graph)) == 2
        parts = gm(*inputs)
    for one, other in zip(parts, whole):  # dq is summed in any order
        assert one.stride() == other.stride() and (one.float() - other.float()).norm() <= 3e-3 * other.float().norm()


@pytest.mark.gpu
def test_a_kernel_that_takes_its_output_to_be_dense_is_left_alone(monkeypatch):
    with attention_order(["efficient"]):
        gm, _ = backward("cuda", 2, 4, 4, 300, 64, torch.bfloat16)
    allow(monkeypatch, 1)
    assert len(calls(split(gm).graph)) == 1


def test_copies_of_heads_multiply_nothing(scarce):
    """All of attention was counted again for the kernels that copy its arguments: twice the time of long rows."""
    pytest.importorskip("triton")
    graphs = [make_fx(of_one_product, tracing_mode="fake")(*OF_ONE_PRODUCT).graph for _ in range(2)]
    with as_on_gpu():
        by_heads.PASS.run(graphs[0], Context("layer"))
    launches = [node for node in graphs[0].nodes if isinstance(node.target, torch._ops.HigherOrderOperator)]
    assert launches and len(calls(graphs[0])) > 1
    assert graph_work(graphs[0]).attention == graph_work(graphs[1]).attention


@pytest.mark.gpu
def test_memory_of_long_rows(monkeypatch):
    """Peaks as predicted from the graph, whole and split."""
    needed = {}
    for room in (1 << 60, 256 << 20):
        allow(monkeypatch, room)
        with attention_order(["cudnn"]):
            gm, inputs = backward("cuda", 1, 32, 8, 32768, 128, torch.bfloat16)
            split(gm)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            gm(*inputs)
            measured, predicted = torch.cuda.max_memory_allocated() - before, extent(gm.graph).peak
        assert abs(measured - predicted) < 0.15 * predicted, (room, measured, predicted)
        needed[room] = measured
    assert needed[256 << 20] < needed[1 << 60] - (800 << 20)


def test_a_copy_by_a_kernel_of_its_own_has_the_same_heads(monkeypatch):
    """Heads inside tokens, as projections have them."""
    lora = pytest.importorskip("tunecompile.templates.lora")
    monkeypatch.setattr(lora, "append_rows", lambda rows, out, at: out[at : at + len(rows)].copy_(rows))
    monkeypatch.setattr(by_heads, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(by_heads, "has_triton", lambda: True)
    heads = torch.randn(2, 4, 5, 3)
    made = by_heads._copy(heads)
    assert torch.equal(made, heads) and made.transpose(1, 2).is_contiguous()
    assert made.untyped_storage().data_ptr() != heads.untyped_storage().data_ptr()


def test_what_a_call_reads_of_its_heads():
    """Sums of the softmax have to be dense, and all else is read where it lies."""
    sums, rows = torch.randn(2, 4, 5), torch.randn(2, 4, 5, 3)
    third, fourth = (by_heads._share(rows, i, 4, "query") for i in (2, 3))
    assert third.data_ptr() == rows[:, 2].data_ptr() and torch.equal(fourth, rows[:, 3:])
    dense = by_heads._share(sums, 1, 2, "logsumexp")
    assert dense.is_contiguous() and torch.equal(dense, sums[:, 2:])
