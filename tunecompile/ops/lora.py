"""Linear layers with low-rank adapters (Hu et al., 2021, arXiv:2106.09685), one or several that share their input."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tunecompile._torch.fake_tensors import size_hint
from tunecompile.ir.op import Cost, has_triton, op, refuse_gpu
from tunecompile.ir.pretend_gpu import on_gpu
from tunecompile.ops import fp8

__all__ = ["lora_linear", "lora_linear_backward"]


def _tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def forward_flops(x, inputs, weights, biases, a, b, *_) -> int:
    return 2 * x.numel() * sum(m.shape[0] for m in b)


def backward_flops(grad, *rest) -> int:
    return forward_flops(*rest)


@op(cost=Cost.MATMUL, flops=forward_flops)
def lora_linear(
    x: Tensor,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """concat_i(x W_i^T + bias_i + scale_i (x_i A_i^T) B_i^T): linears with adapters (Hu et al., 2021, arXiv:2106.09685) that share x.

    The adapter's term is added in the matrix product's accumulator: base and delta are rounded once, together, which is closer to fp32
    than adding two rounded results.

    Args:
        x: [..., K], any floating dtype; T tokens in all.
        inputs: the adapters' own inputs x_i, each as x in shape, after their dropout; empty where they read x.
        weights: the frozen W_i, [N_i, K] in x's dtype. Or one matrix with room beside them, [[W, scale B], [A, 0]]: the W_i below each
            other, every adapter in columns and rows of its own, padded both ways to multiples of 64. Or [W; A] of it.
        biases: [N_i] each, or empty.
        a: A_i, [r_i, K], any floating dtype.
        b: B_i, [N_i, r_i], any floating dtype.
        scales: factors, one a weight: alpha / r, or alpha / sqrt(r) where ranks are stabilised (Kalajdzievski, 2023, arXiv:2312.03732).
        dtype: of the adapters' arithmetic. (PEFT keeps adapters in fp32 where there is no autocast.)

    Returns:
        (y, xa): y is [..., sum of N_i] in x's dtype; xa = concat_i(x_i A_i^T), [T, sum of r_i] in `dtype`, for the backward. It gets no gradient.
    """
    rows = _tokens(x)
    ys, xas = [], []
    for i, weight in enumerate(bases(weights, b, x.shape[-1])):
        xa = _tokens(inputs[i] if inputs else x).to(dtype) @ a[i].to(dtype).t()
        delta = ((xa @ b[i].to(dtype).t()) * scales[i]).to(x.dtype)
        if biases:
            delta = delta + biases[i].to(x.dtype)
        ys.append(torch.addmm(delta, rows, weight.t()))
        xas.append(xa)
    y = ys[0] if len(ys) == 1 else torch.cat(ys, 1)
    return y.reshape(*x.shape[:-1], y.shape[-1]), xas[0] if len(xas) == 1 else torch.cat(xas, 1)


@lora_linear.provider(
    "k_extension",
    because="one product for all siblings; base and delta are rounded once",
    refuses=lambda x, *_: refuse_gpu(x, triton=False),
)
def _(x, inputs, weights, biases, a, b, scales, dtype):
    """[x | xa] @ [W | scale B]^T: one matrix product for all siblings, base and delta in one accumulator."""
    if (weight := unextended(x, weights, b)) is not None:
        xa = down(x, inputs, a, dtype)
        return finish(
            torch.addmm((xa @ on_diagonal(b, scales, dtype).t()).to(x.dtype), _tokens(x), weight.t()), x, biases
        ), xa
    wide, xa = with_xa(x, inputs, a, dtype)
    return finish(wide @ extended(weights, b, scales, dtype, x.shape[-1]).t(), x, biases), xa


def unextended(x: Tensor, weights: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor | None:
    """W of all siblings, where adding what its adapters give moves less than having scale B beside it does: a copy of W for a short batch."""
    width = x.shape[-1]
    if not weights or weights[0].shape[1] > width or (len(weights) > 1 and not stands(weights, b)):
        return None
    return weights[0][: _height(b)] if 2 * size_hint(x.numel() // width) < width else None


def extended(
    weights: Sequence[Tensor], b: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype, width: int
) -> Tensor:
    """[W | scale B | 0]."""
    if not stands(weights, b):
        return extended_weight(weights, b, scales, dtype)
    weight = weights[0][: _height(b)]
    return weight if weight.shape[1] > width else extended_weight([weight], b, scales, dtype)


def _height(b: Sequence[Tensor]) -> int:
    return sum(m.shape[0] for m in b)


def stands(weights: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether these are no W_i, but one matrix in which adapters stand with them."""
    return len(weights) == 1 and weights[0].shape[0] > _height(b)


def bases(weights: Sequence[Tensor], b: Sequence[Tensor], width: int) -> Sequence[Tensor]:
    """The W_i themselves."""
    if not stands(weights, b):
        return weights
    return weights[0][: _height(b), :width].split([m.shape[0] for m in b])


def down(x: Tensor, inputs: Sequence[Tensor], a: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """XA of all siblings, side by side: [T, R]."""
    if inputs:
        return torch.cat([_tokens(v).to(dtype) @ m.to(dtype).t() for v, m in zip(inputs, a)], 1)
    return _tokens(x).to(dtype) @ torch.cat([m.to(dtype) for m in a]).t()


def on_diagonal(b: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Every sibling's scale * B in rows and columns of its own: [N, R]."""
    return torch.block_diag(*[m.to(dtype) * s for m, s in zip(b, scales)])


def finish(y: Tensor, x: Tensor, biases: Sequence[Tensor]) -> Tensor:
    """The product with its biases, in x's leading shape."""
    if biases:
        y = y + torch.cat([bias.to(x.dtype) for bias in biases])
    return y.reshape(*x.shape[:-1], y.shape[-1])


@lora_linear.provider(
    "fp8",
    precision="fp8",
    because=fp8.BECAUSE,
    refuses=lambda x, inputs, weights, *_: fp8.refuse(x, [w.shape[0] for w in weights]),
)
def _(x, inputs, weights, biases, a, b, scales, dtype):
    return forward_in_fp8(x, inputs, fp8.dense_operand(weights), biases, a, b, scales, dtype)


def forward_in_fp8(x, inputs, weight: fp8.Operand, biases, a, b, scales, dtype) -> tuple[Tensor, Tensor]:
    """As "k_extension", with x and the weights in e4m3; XA and B keep their precision."""
    if inputs:
        xa = down(x, inputs, a, dtype)
        rows = fp8.quantize(_tokens(x), xa)
    else:
        xa, *rows = fp8.project(_tokens(x), torch.cat([m.to(dtype) for m in a]), dtype)
    adapters = on_diagonal(b, scales, dtype)
    y = fp8.product(*rows, *weight(adapters, False), fp8.FAST_FORWARD)
    return finish(y, x, biases), xa


def padded(width: int) -> int:
    """Up to whole cache lines of half precision, where matrix products take 64 columns at a time anyway. (Inductor pads rows that
    are not, and would copy them for a template.)"""
    return -(-width // 64) * 64


def beside(x: Tensor, columns: int, make: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """([x | extra | 0], extra) as rows of tokens, with extra = make(x), [T, columns].

    The room is made before anything reads x, and before x is reshaped: so Inductor lets whatever computes x write it there, and
    nothing is copied.
    """
    width = x.shape[-1]
    wide = _tokens(torch.cat([x, x.new_zeros(*x.shape[:-1], padded(width + columns) - width)], -1))
    extra = make(wide[:, :width])
    if not (on_gpu(x) and has_triton()):
        return torch.slice_scatter(wide, extra.to(x.dtype), 1, width, width + columns), extra
    from tunecompile.templates import lora

    lora.append_columns(extra, wide, width)
    return wide, extra


def with_xa(x: Tensor, inputs: Sequence[Tensor], a: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """([x | xa | 0], xa) as rows of tokens."""
    return beside(x, sum(m.shape[0] for m in a), lambda rows: down(rows, inputs, a, dtype))


def extended_weight(
    weights: Sequence[Tensor], b: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """[W | scale B | 0], the siblings' weights below each other and their B in columns of their own."""
    adapters = on_diagonal(b, scales, dtype).to(weights[0].dtype)
    rows, width = adapters.shape[0], weights[0].shape[1] + adapters.shape[1]
    return torch.cat([torch.cat(weights), adapters, adapters.new_zeros(rows, padded(width) - width)], 1)


def written_weight(
    weights: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    dtype: torch.dtype,
    below: Tensor | None = None,
) -> Tensor:
    """`extended_weight` with no copy on the way, on a GPU with Triton; with more rows for `below` [*, K], if given."""
    from tunecompile.templates import lora

    adapters, columns = on_diagonal(b, scales, dtype), weights[0].shape[1]
    rows = adapters.shape[0]
    out = torch.empty(
        (rows + (0 if below is None else below.shape[0]), padded(columns + adapters.shape[1])),
        dtype=dtype,
        device=adapters.device,
    )
    for i, weight in enumerate(weights):
        lora.append_rows(weight, out, sum(w.shape[0] for w in weights[:i]))
    lora.append_columns(adapters, out, columns)
    if below is not None:
        lora.append_rows(below, out, rows)
    return out


def below(a: Sequence[Tensor], rows: int, dtype: torch.dtype) -> Tensor:
    """[A; 0]: what stands below `rows` rows of weights, to the width of [dY | dY B | 0]."""
    adapters = torch.cat([m.to(dtype) for m in a])
    room = padded(rows + adapters.shape[0]) - rows - adapters.shape[0]
    return torch.cat([adapters, adapters.new_zeros(room, adapters.shape[1])])


@lora_linear.backward(
    saves=("x", "inputs", "weights", "biases", "a", "b", "scales", "dtype", "out1"),
    gives=("x", "inputs", "biases", "a", "b"),
    flops=backward_flops,
)
def lora_linear_backward(
    grad: Tensor,
    x: Tensor,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    dtype: torch.dtype,
    out1: Tensor,
) -> list[Tensor]:
    """The gradients of `lora_linear`; dY B and XA stay in `dtype` for dA and dB.

    Args:
        grad: of y, [..., sum of N_i] in its dtype.
        out1: xa, as `lora_linear` returned it. The others are its inputs.

    Returns:
        [dx, dx_i..., dbias_i..., dA_i..., dB_i...], in shape and dtype of what they are gradients of; without dx_i where `inputs` is empty.
    """
    weights = bases(weights, b, x.shape[-1])
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
    return [dx.reshape(x.shape), *d_inputs, *d_biases, *d_a, *d_b]


@lora_linear.backward_op.provider(
    "grouped",
    because="one dX product for all siblings, one pass over dY for their adapters",
    refuses=lambda grad, x, *_: refuse_gpu(x, triton=False),
)
def _(grad, x, inputs, weights, biases, a, b, scales, dtype, out1):
    size, width = _height(b), x.shape[-1]
    if stands(weights, b):
        weight = weights[0][:, :width] if extends(x, inputs, size) else weights[0][:size, :width]
    else:
        rows = [*weights, below(a, size, x.dtype)] if extends(x, inputs, size) else weights
        weight = rows[0] if len(rows) == 1 else torch.cat(rows)
    return adapter_gradients(
        grad, x, inputs, base_gradient(weight, a, dtype), [m.shape[0] for m in b], biases, a, b, scales, dtype, out1
    )


@lora_linear.backward_op.provider(
    "fp8",
    precision="fp8",
    because=fp8.BECAUSE,
    refuses=lambda grad, x, inputs, weights, *_: fp8.refuse(x, [w.shape[0] for w in weights]),
)
def _(grad, x, inputs, weights, biases, a, b, scales, dtype, out1):
    base = base_gradient_in_fp8(fp8.dense_operand(weights), a, dtype)
    return adapter_gradients(grad, x, inputs, base, [w.shape[0] for w in weights], biases, a, b, scales, dtype, out1)


#: (dY, every sibling's scale * B on a diagonal: [N, R], whether the adapters read x) -> (dX, dY times that, dY): rows of tokens
BaseGradient = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


def extends(x: Tensor, inputs: Sequence[Tensor], rows: int) -> bool:
    """Whether dX is [dY | dY B] @ [W; A]. That costs a copy of dY where its producer cannot write it in place; accumulating the adapters'
    share instead writes it, copies it under the product (cuBLAS overwrites its addend) and reads it there, each as large as dX."""
    return not inputs and rows <= 2 * x.shape[-1]


def base_gradient(weight: Tensor, a: Sequence[Tensor], dtype: torch.dtype) -> BaseGradient:
    """For all siblings' weights in one matrix [N, K], below which the A_i may stand."""

    def gradient(grad: Tensor, adapters: Tensor, read_x: bool) -> tuple[Tensor, Tensor, Tensor]:
        columns = grad.shape[-1]
        if weight.shape[0] > columns:
            wide, gb = beside(grad, adapters.shape[1], lambda g: g.to(dtype) @ adapters)
            return wide @ weight, gb, wide[:, :columns]
        g = _tokens(grad)
        gb = g.to(dtype) @ adapters
        if not read_x:
            return g @ weight, gb, g
        return torch.addmm((gb @ torch.cat([m.to(dtype) for m in a])).to(g.dtype), g, weight), gb, g

    return gradient


def base_gradient_in_fp8(weight: fp8.Operand, a: Sequence[Tensor], dtype: torch.dtype) -> BaseGradient:
    """dY and the transposed weights in e4m3; dY B and A keep their precision."""

    def gradient(grad: Tensor, adapters: Tensor, read_x: bool) -> tuple[Tensor, Tensor, Tensor]:
        g = _tokens(grad)
        if not read_x:
            return (
                fp8.product(*fp8.quantize(g, None), *weight(None, True), fp8.FAST_BACKWARD),
                g.to(dtype) @ adapters,
                g,
            )
        gb, *rows = fp8.project(g, adapters.t(), dtype)
        return fp8.product(*rows, *weight(torch.cat([m.to(dtype) for m in a]).t(), True), fp8.FAST_BACKWARD), gb, g

    return gradient


def adapter_gradients(grad, x, inputs, base: BaseGradient, sizes, biases, a, b, scales, dtype, xa) -> list[Tensor]:
    """The backward with one dX product for all siblings, and one pass over dY for every sibling's scale * dY B."""
    rows, ranks = _tokens(x), [m.shape[0] for m in a]
    adapters = on_diagonal(b, scales, dtype)
    dx, gb, g = base(grad, adapters, not inputs)
    if inputs:
        parts = gb.split(ranks, 1)
        d_inputs = [(p @ m.to(dtype)).reshape(v.shape).to(v.dtype) for p, m, v in zip(parts, a, inputs)]
        d_a = [(p.t() @ _tokens(v).to(dtype)).to(m.dtype) for p, m, v in zip(parts, a, inputs)]
    else:
        d_inputs, all_a = [], gb.t() @ rows.to(dtype)
        d_a = [part.to(m.dtype) for part, m in zip(all_a.split(ranks), a)]
    d_biases = [
        p.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(v.dtype)
        for p, v in zip(g.split(sizes, 1), biases)
    ]
    all_b = g.t().to(dtype) @ xa  # [N, R]: the blocks on the diagonal are dB
    d_b = [(part.split(ranks, 1)[i] * scales[i]).to(b[i].dtype) for i, part in enumerate(all_b.split(sizes))]
    return [dx.reshape(x.shape), *d_inputs, *d_biases, *d_a, *d_b]
