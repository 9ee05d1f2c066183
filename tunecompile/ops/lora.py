"""Linear layers with low-rank adapters (Hu et al., 2021, arXiv:2106.09685), one or several that share their input.

Weights are dense or in 4 bits (QLoRA: Dettmers et al., 2023, arXiv:2305.14314): these are dequantised to one scratch
buffer, where a product reads them.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile.ir.op import Cost, has_triton, op
from tunecompile.ir.pretend_gpu import on_gpu
from tunecompile.ir.shape_rule_cache import contiguous_like
from tunecompile.notes import Note, note
from tunecompile.ops.adapters.layout import on_diagonal, padded
from tunecompile.ops.adapters.products import adapted_sum, exact_factors, outer, project
from tunecompile.ops.eight_bits import FORMATS, EightBits
from tunecompile.ops.frozen_weights import DENSE, FrozenWeights, PackedWeights, frozen_weights, packed_as
from tunecompile.ops.nf4 import BITSANDBYTES
from tunecompile.ops.packed import few_rows

__all__ = ["lora_linear", "lora_linear_backward"]


def _tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def forward_flops(x, inputs, weights, biases, a, b, *_) -> int:
    """Count the base products of all siblings; adapters are left out."""
    return 2 * x.numel() * sum(m.shape[0] for m in b)


def backward_flops(grad, *rest) -> int:
    """Count dX: as much as the forward."""
    return forward_flops(*rest)


def _frozen(x: Tensor, weights, b, stored: str) -> FrozenWeights:
    return frozen_weights(weights, stored, [m.shape[0] for m in b], x.shape[-1], x.dtype)


def shapes(x, a, b, dtype) -> tuple[Tensor, Tensor]:
    """Return empty tensors like the results of `lora_linear`, for tracing: its code has a product for each sibling."""
    tokens = _tokens(x).shape[0]
    y = x.new_empty(*x.shape[:-1], sum(m.shape[0] for m in b))
    return y, x.new_empty(tokens, sum(m.shape[0] for m in a), dtype=dtype)


def _example(draw) -> list:
    """Two siblings in 4 bits, of other heights and ranks, with biases."""
    heights, ranks, columns, block = (6, 10), (4, 3), 192, 64
    weights = []
    for n in heights:
        absmax = draw.normal(n * columns // block, dtype=torch.float32).abs() * columns**-0.5
        weights += [draw.codes(n * columns // 2, 1), absmax]
    a = [draw.normal(rank, columns, scale=columns**-0.5) for rank in ranks]
    b = [draw.normal(n, rank, scale=0.5) for n, rank in zip(heights, ranks)]
    x, biases = draw.normal(draw.rows, columns), [*map(draw.normal, heights)]
    return [x, [], weights, biases, a, b, [0.5, 2.0], draw.dtype, packed_as("nf4", block)]


@op(
    cost=Cost.MATMUL,
    flops=forward_flops,
    shapes=lambda x, inputs, weights, biases, a, b, scales, dtype, stored: shapes(x, a, b, dtype),
    example=_example,
)
def lora_linear(
    x: Tensor,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    dtype: torch.dtype,
    stored: str,
) -> tuple[Tensor, Tensor]:
    """Return concat_i(x W_i^T + bias_i + scale_i (x_i A_i^T) B_i^T): adapted linears that share x (arXiv:2106.09685).

    The adapter's term is added in the matrix product's accumulator: base and delta are rounded once, together, which is
    closer to fp32 than adding two rounded results.

    Args:
        x: [..., K], any floating dtype; T tokens in all.
        inputs: the adapters' own inputs x_i, after dropout, each with x's shape; empty where the adapters read x.
        weights: the frozen W_i, [N_i, K], in x's dtype; or one matrix that holds them and the adapters, in the layout
            of `tunecompile.ops.frozen_weights`; or the tensors of weights in 4 bits, one weight's after the other's.
        biases: [N_i] each, or empty.
        a: A_i, [r_i, K], any floating dtype.
        b: B_i, [N_i, r_i], any floating dtype.
        scales: factors, one a weight: alpha / r, or alpha / sqrt(r) with rank stabilisation (Kalajdzievski, 2023,
            arXiv:2312.03732).
        dtype: of the adapters' arithmetic. (PEFT keeps adapters in fp32 where there is no autocast.)
        stored: how the weights are stored: "dense", or as `tunecompile.ops.frozen_weights.packed_as` says, "nf4:64".

    Returns:
        (y, xa): y is [..., sum of N_i] in x's dtype; xa = concat_i(x_i A_i^T), [T, sum of r_i] in `dtype`, is for the
        backward and gets no gradient.
    """
    rows = _tokens(x)
    ys, xas = [], []
    for i, weight in enumerate(_frozen(x, weights, b, stored).members()):
        xa = _tokens(inputs[i] if inputs else x).to(dtype) @ a[i].to(dtype).t()
        delta = ((xa @ b[i].to(dtype).t()) * scales[i]).to(x.dtype)
        if biases:
            delta = delta + biases[i].to(x.dtype)
        ys.append(torch.addmm(delta, rows, weight.t()))
        xas.append(xa)
    y = ys[0] if len(ys) == 1 else torch.cat(ys, 1)
    return y.reshape(*x.shape[:-1], y.shape[-1]), xas[0] if len(xas) == 1 else torch.cat(xas, 1)


def _refuse_few(x, inputs, weights, a, b, dtype, stored) -> Note | None:
    if inputs or dtype != x.dtype:
        return note("arguments-not-supported")
    return few_rows.refuse(x, _frozen(x, weights, b, stored), a, b)


@lora_linear.provider("few_rows", because=few_rows.BECAUSE, refuses=_refuse_few)
def _(x, inputs, weights, biases, a, b, scales, dtype, stored):
    """Two launches for all siblings, adapters included."""
    y, xa = few_rows.product(_tokens(x).contiguous(), _frozen(x, weights, b, stored), a, b, scales)
    return finish(y, x, biases), xa


@lora_linear.provider(
    "k_extension",
    because="adapters join in the products of the weights: one for all siblings, or for few tokens one each",
    refuses=lambda x, weights, b, stored: _frozen(x, weights, b, stored).refuse(x),
)
def _(x, inputs, weights, biases, a, b, scales, dtype, stored):
    """See `product`."""
    y, xa = product(x, inputs, _frozen(x, weights, b, stored), a, b, scales, dtype)
    return finish(y, x, biases), xa


def product(x: Tensor, inputs, frozen: FrozenWeights, a, b, scales, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (y without biases, xa), rows of tokens.

    y is [x | xa] @ [W | scale B]^T, base and delta in one accumulator; or see `with_term`.
    """
    if (weights := frozen.without_copy(x.numel() // x.shape[-1])) is None:
        wide, xa = with_xa(x, inputs, a, dtype)
        return wide @ frozen.extended(b, scales, dtype).t(), xa
    xa = down(x, inputs, a, dtype)
    return with_term(_tokens(x), xa, weights, b, scales), xa


def with_term(x: Tensor, xa: Tensor, weights: Sequence[Tensor], b, scales) -> Tensor:
    """Return concat_i(x W_i^T + scale_i xa_i B_i^T), rows of tokens: each product adds its adapter's term."""
    factors = exact_factors(xa, on_diagonal(b, scales, xa.dtype).t(), x.dtype)
    firsts = itertools.accumulate((w.shape[0] for w in weights[:-1]), initial=0)
    return adapted_sum(*factors, [x] * len(weights), [w.t() for w in weights], [*firsts])


def down(x: Tensor, inputs: Sequence[Tensor], a: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return XA of all siblings, side by side: [T, R] in `dtype`."""
    if inputs:
        return torch.cat([project(_tokens(v), m.to(dtype).t(), dtype) for v, m in zip(inputs, a)], 1)
    return project(_tokens(x), torch.cat([m.to(dtype) for m in a]).t(), dtype)


def finish(y: Tensor, x: Tensor, biases: Sequence[Tensor]) -> Tensor:
    """Return the product `y`, [T, N], with its biases added, in x's leading shape."""
    if biases:
        y = y + torch.cat([bias.to(x.dtype) for bias in biases])
    return y.reshape(*x.shape[:-1], y.shape[-1])


def refuse_in(eight: EightBits, x: Tensor, frozen: FrozenWeights) -> Note | None:
    """Return why products of x and these weights cannot be in 8 bits, or None: `EightBits.refuse` says more."""
    return frozen.refuse_eight_bits() or eight.refuse(x, frozen.rows)


def _forward_in(eight: EightBits) -> None:
    @lora_linear.provider(
        eight.name,
        precision=eight.name,
        because=eight.because,
        refuses=lambda x, weights, b, stored: refuse_in(eight, x, _frozen(x, weights, b, stored)),
    )
    def _(x, inputs, weights, biases, a, b, scales, dtype, stored):
        """As "k_extension", with x and the weights in 8 bits; XA and B keep their precision."""
        xa, frozen = down(x, inputs, a, dtype), _frozen(x, weights, b, stored)
        y = eight.product(_tokens(x), xa, frozen, on_diagonal(b, scales, dtype), False)
        return finish(y, x, biases), xa


def beside(x: Tensor, columns: int, make: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return ([x | extra | 0], extra) as rows of tokens, with extra = make(x), [T, columns].

    The wide buffer is allocated before anything reads x, and before x is reshaped. So Inductor makes the kernel that
    computes x write into it, without a copy."""
    width = x.shape[-1]
    wide = _tokens(torch.cat([x, x.new_zeros(*x.shape[:-1], padded(width + columns) - width)], -1))
    extra = make(wide[:, :width])
    if not (on_gpu(x) and has_triton()):
        return torch.slice_scatter(wide, extra.to(x.dtype), 1, width, width + columns), extra
    templates.lora.append_columns(extra, wide, width)
    return wide, extra


def with_xa(x: Tensor, inputs: Sequence[Tensor], a: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ([x | xa | 0], xa) as rows of tokens."""
    return beside(x, sum(m.shape[0] for m in a), lambda rows: down(rows, inputs, a, dtype))


@lora_linear.backward(
    gives=("x", "inputs", "biases", "a", "b"),
    flops=backward_flops,
    shapes=lambda grad, x, inputs, weights, biases, a, b, *_: contiguous_like(x, *inputs, *biases, *a, *b),
)
def lora_linear_backward(grad, x, inputs, weights, biases, a, b, scales, dtype, stored, out1) -> list[Tensor]:
    """Return the gradients of `lora_linear`; dY B and XA stay in `dtype` for dA and dB.

    Weights in 4 bits are dequantised a second time.

    Args:
        grad: of y, [..., sum of N_i] in its dtype.
        out1: xa, as `lora_linear` returned it. The others are its inputs.

    Returns:
        [dx, dx_i..., dbias_i..., dA_i..., dB_i...], each with the shape and dtype of its input; without dx_i where
        `inputs` is empty.
    """
    weights = _frozen(x, weights, b, stored).members()
    grads = _tokens(grad).split([w.shape[0] for w in weights], 1)
    xas = out1.split([m.shape[0] for m in a], 1)
    dx, d_inputs, d_biases, d_a, d_b = None, [], [], [], []
    for i, weight in enumerate(weights):
        g = grads[i].to(dtype)
        gb = (g @ b[i].to(dtype)) * scales[i]
        down = gb @ a[i].to(dtype)
        base = down.to(x.dtype) if not inputs else None
        if dx is not None:
            base = dx if base is None else base + dx
        dx = grads[i] @ weight if base is None else torch.addmm(base, grads[i], weight)
        source = inputs[i] if inputs else x
        if inputs:
            d_inputs.append(down.reshape(source.shape).to(source.dtype))
        if biases:
            d_biases.append(grads[i].sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(biases[i].dtype))
        d_a.append((gb.t() @ _tokens(source).to(dtype)).to(a[i].dtype))
        d_b.append(((g.t() @ xas[i]) * scales[i]).to(b[i].dtype))
    assert dx is not None
    return [dx.reshape(x.shape), *d_inputs, *d_biases, *d_a, *d_b]


@lora_linear_backward.provider(
    "grouped",
    because="adapters join in the products for dX: one for all siblings, or for few tokens one each; one pass over dY",
    refuses=lambda x, weights, b, stored: _frozen(x, weights, b, stored).refuse(x),
)
def _(grad, x, inputs, weights, biases, a, b, scales, dtype, stored, out1):
    base = base_gradient(_frozen(x, weights, b, stored), a, dtype)
    return adapter_gradients(grad, x, inputs, base, biases, a, b, scales, dtype, out1)


def _backward_in(eight: EightBits) -> None:
    @lora_linear_backward.provider(
        eight.name,
        precision=eight.name,
        because=eight.because,
        refuses=lambda x, weights, b, stored: refuse_in(eight, x, _frozen(x, weights, b, stored)),
    )
    def _(grad, x, inputs, weights, biases, a, b, scales, dtype, stored, out1):
        base = base_gradient_in(eight, _frozen(x, weights, b, stored), a, dtype)
        return adapter_gradients(grad, x, inputs, base, biases, a, b, scales, dtype, out1)


for each in FORMATS:
    _forward_in(each)
    _backward_in(each)


def _refuse_bitsandbytes(x, weights, b, stored) -> str | None:
    frozen = _frozen(x, weights, b, stored)
    return frozen.refuse_bitsandbytes() if isinstance(frozen, PackedWeights) else note("not-in-4-bits")


@lora_linear.provider("bitsandbytes", because=BITSANDBYTES, refuses=_refuse_bitsandbytes)
def _(x, inputs, weights, biases, a, b, scales, dtype, stored):
    args = (x, inputs, _frozen(x, weights, b, stored).dequantized(), biases, a, b, scales, dtype, DENSE)
    return lora_linear.choose(args).run(*args)


@lora_linear_backward.provider("bitsandbytes", because=BITSANDBYTES, refuses=_refuse_bitsandbytes)
def _(grad, x, inputs, weights, biases, a, b, scales, dtype, stored, out1):
    args = (grad, x, inputs, _frozen(x, weights, b, stored).dequantized(), biases, a, b, scales, dtype, DENSE, out1)
    return lora_linear_backward.choose(args).run(*args)


#: (dY, every sibling's scale * B on a diagonal: [N, R], whether adapters read x) -> (dX, dY B, dY), as rows of tokens
BaseGradient = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


def base_gradient(frozen: FrozenWeights, a: Sequence[Tensor], dtype: torch.dtype) -> BaseGradient:
    """Return the `BaseGradient` of all siblings.

    [dY | dY B] @ [W; A] costs a copy of dY if its producer cannot write it in place. Adding to the adapters' term
    instead writes and reads dX once more.
    """

    def gradient(grad: Tensor, adapters: Tensor, read_x: bool) -> tuple[Tensor, Tensor, Tensor]:
        g, height = _tokens(grad), frozen.height
        if read_x and height <= 2 * frozen.columns and not frozen.adds(g.shape[0]):
            wide, gb = beside(grad, adapters.shape[1], lambda g: project(g, adapters, dtype))
            return wide @ frozen.stacked(a, grad.dtype), gb, wide[:, :height]
        gb = project(g, adapters, dtype)
        return sum_of_products(g, gb if read_x else None, frozen, a), gb, g

    return gradient


def sum_of_products(g: Tensor, gb: Tensor | None, frozen: FrozenWeights, a: Sequence[Tensor]) -> Tensor:
    """Return dX, the adapters' term in it, if dY B is given: the sum of the products of dY_i with each weight."""
    each = frozen.matrices if frozen.adds(g.shape[0]) else [frozen.stacked(a, g.dtype, with_adapters=False)]
    terms = [*zip(g.split([w.shape[0] for w in each], 1), each)]
    if gb is not None:
        terms.insert(0, exact_factors(gb, torch.cat([m.to(gb.dtype) for m in a]), g.dtype))
    (left, right), *rest = terms
    return adapted_sum(left, right, *map(list, zip(*rest)), [0] * len(rest)) if rest else left @ right


def base_gradient_in(eight: EightBits, weight: FrozenWeights, a: Sequence[Tensor], dtype: torch.dtype) -> BaseGradient:
    """Return a `BaseGradient` with dY and the transposed weights in 8 bits; dY B and A keep their precision."""

    def gradient(grad: Tensor, adapters: Tensor, read_x: bool) -> tuple[Tensor, Tensor, Tensor]:
        g = _tokens(grad)
        gb = project(g, adapters, dtype)
        if not read_x:
            return eight.product(g, None, weight, None, True), gb, g
        return eight.product(g, gb, weight, torch.cat([m.to(dtype) for m in a]).t(), True), gb, g

    return gradient


def adapter_gradients(grad, x, inputs, base: BaseGradient, biases, a, b, scales, dtype, xa) -> list[Tensor]:
    """Return all gradients: dX by `base`, and one pass over dY for every scale_i dY B_i."""
    rows, ranks, sizes = _tokens(x), [m.shape[0] for m in a], [m.shape[0] for m in b]
    adapters = on_diagonal(b, scales, dtype)
    dx, gb, g = base(grad, adapters, not inputs)
    if inputs:
        parts = gb.split(ranks, 1)
        d_inputs = [(p @ m.to(dtype)).reshape(v.shape).to(v.dtype) for p, m, v in zip(parts, a, inputs)]
        d_a = [outer(p, _tokens(v), dtype).to(m.dtype) for p, m, v in zip(parts, a, inputs)]
    else:
        d_inputs, all_a = [], outer(gb, rows, dtype)
        d_a = [part.to(m.dtype) for part, m in zip(all_a.split(ranks), a)]
    d_biases = [
        p.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(v.dtype)
        for p, v in zip(g.split(sizes, 1), biases)
    ]
    all_b = outer(g, xa, dtype)  # [N, R]: its diagonal blocks are dB
    d_b = [(part.split(ranks, 1)[i] * scales[i]).to(b[i].dtype) for i, part in enumerate(all_b.split(sizes))]
    return [dx.reshape(x.shape), *d_inputs, *d_biases, *d_a, *d_b]
