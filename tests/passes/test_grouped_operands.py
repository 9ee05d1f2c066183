"""Operands of grouped products keep the graph's strides in generated code."""

import importlib

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tunecompile.compiler.pass_manager import Context
from tunecompile.ops.experts.products import BY_TORCH
from tunecompile.ops.experts.rows import spread
from tunecompile.passes import lower

KEEPS = torch.ops.aten.as_strided.default


def weight_gradient(tokens, order, right, ends):
    """As that of a down projection: the rows are gathered where they are read."""
    return BY_TORCH.outer(spread(tokens, order, 4), right * 2, ends)


def inputs(rows=64):
    torch.manual_seed(0)
    tokens, right = torch.randn(rows // 4, 32).bfloat16(), torch.randn(rows, 24).bfloat16()
    return tokens, torch.randperm(rows), right, torch.tensor([3, 3, rows - 14, rows - 3], dtype=torch.int32)


def lowered(function, given, mode="fake"):
    gm = make_fx(function, tracing_mode=mode)(*given)
    lower.grouped_operands.PASS.run(gm.graph, Context("layer"))
    gm.graph.lint()
    gm.recompile()
    return gm


def kept(gm):
    return gm.graph.find_nodes(op="call_function", target=KEEPS)


def test_inductor_stores_rows_as_rows(monkeypatch):
    """Without the pass it stores the gathered rows transposed, and an H100 asserts."""
    kernels, seen = importlib.import_module("torch._inductor.select_algorithm").extern_kernels, []

    def product(a, b, *args, **kwargs):
        seen.append((a.t().is_contiguous(), b.is_contiguous()))
        return torch._grouped_mm(a, b, *args, **kwargs)

    given = inputs()
    gm = lowered(weight_gradient, given)
    monkeypatch.setattr(kernels, "_grouped_mm", product, raising=False)
    with torch._inductor.config.patch(cpp_cache_precompile_headers=False):  # five seconds, for more kernels than one
        made = torch._inductor.compile(gm, list(given))(*given)
    assert seen == [(True, True)]
    assert torch.equal(made, weight_gradient(*given))


def test_values_are_the_same_for_any_number_of_rows():
    def gradient(values, ends):
        left, right = (values[:, None] * torch.arange(columns, dtype=torch.bfloat16) for columns in (32, 24))
        return BY_TORCH.outer(left, right, ends)

    gm = lowered(gradient, (torch.randn(64).bfloat16(), inputs()[3]), "symbolic")
    assert len(kept(gm)) == 2
    given = torch.randn(128).bfloat16(), inputs(128)[3]
    assert torch.equal(gm(*given), gradient(*given))


def test_rows_of_two_products_keep_one_memory():
    def gradients(x, first, second, ends):
        rows = x.sin()
        return BY_TORCH.outer(rows, first, ends), BY_TORCH.outer(second, rows, ends)

    x = torch.randn(64, 32).bfloat16()
    gm = lowered(gradients, (x, x, x, inputs()[3]))
    assert {node.args[0].target for node in kept(gm)} == {torch.ops.aten.sin.default}


def test_a_piece_is_copied():
    """A view with an offset: its beginning is not that of the memory that it is in."""

    def gradient(x, right, ends):
        return BY_TORCH.outer(x.sin()[64:], right, ends)

    given = torch.randn(128, 32).bfloat16(), inputs()[2], inputs()[3]
    gm = lowered(gradient, given)
    (node,) = kept(gm)
    assert node.args[0].target is torch.ops.aten.clone.default
    assert torch.equal(gm(*given), gradient(*given))


def test_inputs_are_left_alone():
    def gradient(left, right, ends):
        return BY_TORCH.outer(left, right[4:], ends)

    _, _, right, ends = inputs(68)
    assert not kept(lowered(gradient, (torch.randn(64, 32).bfloat16(), right, ends)))


def test_gradients_of_torch_keep_theirs():
    """Experts that are not recognised have torch's own gradient."""

    def gradient(x, weight, ends):
        weight = weight.detach().requires_grad_()
        made = torch._grouped_mm(x.sin(), weight.transpose(1, 2), offs=ends)
        return torch.autograd.grad(made, weight, made.detach().cos())[0]

    given = torch.randn(64, 32).bfloat16(), torch.randn(4, 24, 32).bfloat16(), inputs()[3]
    gm = lowered(gradient, given)
    assert {node.args[0].target for node in kept(gm)} >= {torch.ops.aten.sin.default, torch.ops.aten.cos.default}
    assert torch.equal(gm(*given), gradient(*given))
