"""An MLP with LoRA on its projections as one op, whose backward reads the wide tensors only once.

The gradients of gate and up are the largest tensors of a decoder layer. As one op they are computed together with the
adapters' gradients, which sum over them (`tunecompile.templates.lora_mlp`), and written where the next product reads
them. Gated linear units: Shazeer, 2020, arXiv:2002.05202; adapters: Hu et al., 2021, arXiv:2106.09685. An MLP without a
gate (GELU between two linears) is the same op: its first product is as wide as the activation.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tunecompile._torch.card import AMPERE, older_than
from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.ir.shape_rule_cache import contiguous_like
from tunecompile.notes import Note, note
from tunecompile.ops import lora, lora_nf4
from tunecompile.ops.adapters.layout import on_diagonal, padded
from tunecompile.ops.eight_bits import FORMATS, EightBits
from tunecompile.ops.frozen_weights import FrozenWeights, PackedWeights
from tunecompile.ops.norms import compute_dtype
from tunecompile.ops.packed import few_rows
from tunecompile.ops.swiglu import activated, activated_backward, gated_activation, gated_activation_backward

__all__ = ["lora_mlp", "lora_mlp_backward"]

MAX_RANK = 64  #: the template keeps three [columns, rank] sums in registers


WIDE, DOWN = slice(None, -1), slice(-1, None)  #: gate and up, or the one projection to both; and down, in lists


def inner_width(a: Sequence[Tensor]) -> int:
    """Return F, the width of the activation, which the adapter of down reads."""
    return a[-1].shape[1]


def activation_of(gate_up: Tensor, inner: int, activation: str) -> Tensor:
    """Return the activation [..., F] of gate_up, by the references."""
    if gate_up.shape[-1] == inner:
        return activated(gate_up, activation)
    return gated_activation.reference(*gate_up.split(inner, -1), activation)


def activation_backward(grad: Tensor, gate_up: Tensor, inner: int, activation: str) -> Tensor:
    """Return the gradient of gate_up, by the references."""
    if gate_up.shape[-1] == inner:
        return activated_backward(grad, gate_up, activation)
    return torch.cat(gated_activation_backward.reference(grad, *gate_up.split(inner, -1), activation), -1)


def frozen_weights(
    x, weights, packed, absmax, code, scale, offset, a, rows, blocksize, quant_type
) -> tuple[FrozenWeights, FrozenWeights]:
    """Return the frozen weights of gate|up and of down, from the arguments of `lora_mlp` that describe them."""
    columns, inner = x.shape[-1], inner_width(a)
    if not weights:
        whole = PackedWeights(packed, absmax, code, scale, offset, rows, blocksize, quant_type, columns, x.dtype)
        wide, down = whole.part(WIDE, columns), whole.part(DOWN, inner)
        return FrozenWeights.of_packed(wide), FrozenWeights.of_packed(down)
    wide, down = (FrozenWeights.dense(weights[of], rows[of], k) for of, k in zip((WIDE, DOWN), (columns, inner)))
    return wide, down


def _product(frozen: FrozenWeights, wide: Tensor, xa: Tensor, biases, b, scales) -> Tensor:
    """[x | xa | 0] @ [W | scale B | 0]^T + biases, [T, all rows]."""
    if (weight := frozen.without_copy(wide.shape[0])) is not None:
        y = torch.addmm(xa @ on_diagonal(b, scales, xa.dtype).t(), wide[:, : frozen.columns], weight.t())
    else:
        y = wide @ frozen.extended(b, scales, wide.dtype).t()
    return with_biases(y, biases)


def with_biases(y: Tensor, biases: Sequence[Tensor]) -> Tensor:
    """Return a product [T, all rows] with the biases of its projections added, in its dtype."""
    return y + torch.cat([bias.to(y.dtype) for bias in biases]) if biases else y


def forward_flops(x, weights, packed, absmax, code, scale, offset, biases, a, b, scales, rows, *_) -> int:
    """Count the base products; adapters are left out."""
    return 2 * (x.numel() // x.shape[-1]) * (sum(rows[WIDE]) * x.shape[-1] + rows[-1] * inner_width(a))


def backward_flops(grad, x, *rest) -> int:
    """Count the gradients of the products' inputs: as much as the forward."""
    return forward_flops(x, *rest)


def _shapes(x, weights, packed, absmax, code, scale, offset, biases, a, b, *_) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gate_up, xa = lora.shapes(x, a[WIDE], b[WIDE], x.dtype)
    y, xa_down = lora.shapes(x, a[DOWN], b[DOWN], x.dtype)
    return y, gate_up, xa, xa_down


def _backward_shapes(grad, x, weights, packed, absmax, code, scale, offset, biases, a, b, *_) -> list[Tensor]:
    return contiguous_like(x, *biases, *a, *b)


@op(cost=Cost.MATMUL, flops=forward_flops, shapes=_shapes)
def lora_mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    packed: Sequence[Tensor],
    absmax: Sequence[Tensor],
    code: Sequence[Tensor],
    scale: Sequence[Tensor],
    offset: Sequence[Tensor],
    biases: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    rows: Sequence[int],
    blocksize: int,
    quant_type: str,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return down(activation(gate(x)) * up(x)), where each projection is a linear with an adapter.

    All arithmetic is in x's dtype, adapters included, as in `tunecompile.ops.lora.lora_linear`. Lists have one member
    each for gate, up and down, in this order; or two, where one projection with one adapter gives gate | up, or where
    nothing is gated: down(activation(gate(x))). (Gated linear units: arXiv:2002.05202; adapters: arXiv:2106.09685.)

    Args:
        x: [..., K], any floating dtype; T tokens in all.
        weights: dense ones, [F, K], [F, K] and [K', F], or [2F, K] and [K', F], or [F, K] and [K', F], in x's dtype;
            or two matrices that hold weights and adapters, of gate|up and of down
            (`tunecompile.ops.frozen_weights`); or empty, where packed ones are given.
        packed: uint8, one a projection, or empty. This and absmax, code, scale, offset, blocksize and quant_type as for
            `tunecompile.ops.lora_nf4.lora_linear_nf4`.
        biases: one a projection, of as many elements as its weight has rows, any floating dtype; or empty.
        a: A of each adapter, [r_gate, K], [r_up, K] and [r_down, F], any floating dtype; or [r, K] and [r_down, F].
        b: B of each adapter, [F, r_gate], [F, r_up] and [K', r_down], any floating dtype; or [2F or F, r] and
            [K', r_down].
        scales: factors, one an adapter.
        rows: (F, F, K'), or (2F, K'), or (F, K').
        activation: "silu", "gelu" or "gelu_tanh", as for `tunecompile.ops.swiglu.gated_activation`.

    Returns:
        (y, gate_up, xa, xa_down) in x's dtype: [..., K'], [..., 2F or F], [T, r_gate + r_up] (or [T, r]) and
        [T, r_down].
        Only y gets a gradient; the others are for the backward.
    """
    wide, down = frozen_weights(x, weights, packed, absmax, code, scale, offset, a, rows, blocksize, quant_type)
    reference = lora.lora_linear.reference
    gate_up, xa = reference(x, [], wide.members(), biases[WIDE], a[WIDE], b[WIDE], scales[WIDE], x.dtype)
    act = activation_of(gate_up, inner_width(a), activation)
    y, xa_down = reference(act, [], down.members(), biases[DOWN], a[DOWN], b[DOWN], scales[DOWN], x.dtype)
    return y, gate_up, xa, xa_down


def _refuse(x, weights, packed, a, b) -> Note | None:
    """Why the template cannot run, or None."""
    if reason := refuse_gpu(x):
        return reason
    if older_than(x.device, AMPERE):
        return note("gpu-before-ampere")
    if (rank := max(m.shape[0] for m in a)) > MAX_RANK:
        return note("rank-too-large", rank=rank, limit=MAX_RANK)
    if not all(p.is_contiguous() for p in packed) or not all(m.stride(-1) == 1 for m in (*weights, *a, *b)):
        return note("not-contiguous", "weights or adapters are")
    return None if all(w.dtype == x.dtype for w in weights) else note("dtypes-differ", "weights and activations")


def _refuse_few(x, packed, a, b, rows, blocksize) -> Note | None:
    if not packed:
        return note("arguments-not-supported")
    pieces = ((WIDE, x.shape[-1]), (DOWN, inner_width(a)))
    found = (few_rows.refuse(x, k, packed[of], rows[of], blocksize, a[of], b[of]) for of, k in pieces)
    return next((reason for reason in found if reason), None)


@lora_mlp.provider("few_rows", because=few_rows.BECAUSE, refuses=_refuse_few)
def _(*, x, weights, biases, a, b, scales, rows, blocksize, quant_type, activation, used, **packed):
    """Two launches for gate and up, two for down, and the activation between them."""
    inner = inner_width(a)
    whole = PackedWeights(**packed, rows=rows, blocksize=blocksize, quant_type=quant_type, columns=0, dtype=x.dtype)
    tokens = x.reshape(-1, x.shape[-1]).contiguous()
    gate_up, xa = few_rows.product(tokens, whole.part(WIDE, x.shape[-1]), a[WIDE], b[WIDE], scales[WIDE])
    gate_up = with_biases(gate_up, biases[WIDE])
    if not (used[0] or used[3]):
        return None, gate_up.reshape(*x.shape[:-1], -1), xa, None
    act = activation_of(gate_up, inner, activation).contiguous()
    y, xa_down = few_rows.product(act, whole.part(DOWN, inner), a[DOWN], b[DOWN], scales[DOWN])
    y = with_biases(y, biases[DOWN])
    return y.reshape(*x.shape[:-1], rows[-1]), gate_up.reshape(*x.shape[:-1], -1), xa, xa_down


@lora_mlp.provider(
    "joined",
    because="the activation is written where the second product reads it",
    refuses=_refuse,
)
def _(*, x, biases, a, b, scales, rows, activation, used, **frozen):
    """Both products by K extension; the activation is written where the second one reads it. y is not recomputed."""
    from tunecompile.templates import lora as pieces
    from tunecompile.templates import swiglu

    (gate_and_up, down), inner = frozen_weights(x, a=a, rows=rows, **frozen), inner_width(a)
    wide, xa = lora.with_xa(x, [], a[WIDE], x.dtype)
    gate_up = _product(gate_and_up, wide, xa, biases[WIDE], b[WIDE], scales[WIDE])
    if not (used[0] or used[3]):
        return None, gate_up.reshape(*x.shape[:-1], -1), xa, None
    act = torch.empty((wide.shape[0], padded(inner + a[-1].shape[0])), dtype=x.dtype, device=x.device)
    swiglu.forward(*gate_up.split(inner, 1), activation=activation, out=act)
    xa_down = act[:, :inner] @ a[-1].to(x.dtype).t()
    y = None
    if used[0]:
        pieces.append_columns(xa_down, act, inner)
        y = _product(down, act, xa_down, biases[DOWN], b[DOWN], scales[DOWN]).reshape(*x.shape[:-1], rows[-1])
    return y, gate_up.reshape(*x.shape[:-1], -1), xa, xa_down


def _refuse_in(eight: EightBits, x, weights, packed, a, b, rows) -> Note | None:
    if _refuse(x, weights, packed, a, b):
        return note("backward-not-joined")
    found = (lora_nf4.refuse_in(eight, x, packed, rows[of]) for of in (WIDE, DOWN))
    return next((reason for reason in found if reason), None)


def _forward_in(eight: EightBits) -> None:
    @lora_mlp.provider(
        f"joined_{eight.name}", precision=eight.name, because=eight.because, refuses=partial(_refuse_in, eight)
    )
    def _(*, x, biases, a, b, scales, rows, activation, used, **frozen):
        """As "joined", the frozen products in 8 bits."""
        from tunecompile.templates import swiglu

        (wide, down), inner, lead = frozen_weights(x, a=a, rows=rows, **frozen), inner_width(a), x.shape[:-1]
        tokens = x.reshape(-1, x.shape[-1])
        xa = tokens @ torch.cat([m.to(x.dtype) for m in a[WIDE]]).t()
        gate_up = eight.product(tokens, xa, wide, on_diagonal(b[WIDE], scales[WIDE], x.dtype), False)
        gate_up = with_biases(gate_up, biases[WIDE])
        if not (used[0] or used[3]):
            return None, gate_up.reshape(*lead, -1), xa, None
        act = swiglu.forward(*gate_up.split(inner, 1), activation=activation)
        xa_down, y = act @ a[-1].to(x.dtype).t(), None
        if used[0]:
            y = eight.product(act, xa_down, down, on_diagonal(b[DOWN], scales[DOWN], x.dtype), False)
            y = with_biases(y, biases[DOWN]).reshape(*lead, rows[-1])
        return y, gate_up.reshape(*lead, -1), xa, xa_down


@lora_mlp.backward(gives=("x", "biases", "a", "b"), flops=backward_flops, shapes=_backward_shapes)
def lora_mlp_backward(
    grad,
    x,
    weights,
    packed,
    absmax,
    code,
    scale,
    offset,
    biases,
    a,
    b,
    scales,
    rows,
    blocksize,
    quant_type,
    activation,
    out1,
    out2,
    out3,
) -> list[Tensor]:
    """Return the gradients of `lora_mlp`; the activation is recomputed from gate_up.

    Args:
        grad: of y, [..., K'] in its dtype.
        out1: gate_up, out2: xa, out3: xa_down, as `lora_mlp` returned them. The others are its inputs.

    Returns:
        [dx, dbias of each projection, dA and dB of the same], each with the shape and dtype of its input.
    """
    frozen, down = frozen_weights(x, weights, packed, absmax, code, scale, offset, a, rows, blocksize, quant_type)
    act, backward = activation_of(out1, inner_width(a), activation), lora.lora_linear_backward.reference
    adapters = [], a[DOWN], b[DOWN], scales[DOWN], x.dtype, out3
    d_act, da_down, db_down = backward(grad, act, [], down.members(), *adapters)
    wide = activation_backward(d_act, out1, inner_width(a), activation)
    dx, *rest = backward(wide, x, [], frozen.members(), [], a[WIDE], b[WIDE], scales[WIDE], x.dtype, out2)
    d_biases = cast(bias_gradients(wide, grad, rows, biases), biases)
    count = len(a) - 1
    return [dx, *d_biases, *rest[:count], da_down, *rest[count:], db_down]


def bias_gradients(wide: Tensor, grad: Tensor, rows: Sequence[int], biases: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the biases, sums over tokens in fp32 or wider, from those of gate_up and of y."""
    parts = (*wide.reshape(-1, wide.shape[-1]).split(rows[WIDE], 1), grad.reshape(-1, grad.shape[-1]))
    return [p.sum(0, dtype=compute_dtype(p.dtype)) for p, _ in zip(parts, biases)]


@lora_mlp_backward.provider(
    "joined",
    because="the adapters' sums are taken in the pass that makes the gradients: 0.47 ms, apart 0.54 (8192x14336, H200)",
    refuses=_refuse,
)
def _(*, grad, x, biases, a, b, scales, rows, activation, out1, out2, out3, dying=(), **frozen):
    from tunecompile.templates import lora as pieces

    (gate_and_up, down), wide = frozen_weights(x, a=a, rows=rows, **frozen), sum(rows[WIDE])

    def through_down(adapter):
        extended, gb = lora.beside(grad, adapter.shape[1], lambda g: g @ adapter)
        return extended @ down.stacked(a[DOWN], x.dtype), gb, extended[:, : grad.shape[-1]]

    def through_wide(both, adapter):
        gb = both[:, :wide] @ adapter
        pieces.append_columns(gb, both, wide)
        return both @ gate_and_up.stacked(a[WIDE], x.dtype), gb

    width = padded(wide + sum(m.shape[0] for m in a[WIDE]))
    gate_up = out1.reshape(-1, wide)
    both = with_room(gate_up, width) if "out1" in dying else None
    gate_up = gate_up if both is None else both[:, :wide]
    saved = (gate_up, out2, out3)
    return _joined(x, biases, a, b, scales, rows, activation, saved, through_down, through_wide, both, width)


def _backward_in(eight: EightBits) -> None:
    @lora_mlp_backward.provider(
        f"joined_{eight.name}", precision=eight.name, because=eight.because, refuses=partial(_refuse_in, eight)
    )
    def _(*, grad, x, biases, a, b, scales, rows, activation, out1, out2, out3, **frozen):
        wide, down = frozen_weights(x, a=a, rows=rows, **frozen)

        def product(weights, g, adapter, a):
            gb = g @ adapter
            return eight.product(g, gb, weights, torch.cat([m.to(x.dtype) for m in a]).t(), True), gb

        def through_down(adapter):
            g = grad.reshape(-1, grad.shape[-1])
            return *product(down, g, adapter, a[DOWN]), g

        def through_wide(both, adapter):
            return product(wide, both, adapter, a[WIDE])

        width = sum(rows[WIDE])
        saved = (out1.reshape(-1, width), out2, out3)
        return _joined(x, biases, a, b, scales, rows, activation, saved, through_down, through_wide, None, width)


for each in FORMATS:
    _forward_in(each)
    _backward_in(each)


def with_room(gate_up: Tensor, width: int) -> Tensor:
    """Return [gate | up | 0], to be overwritten by its gradient. Inductor makes a product write there directly."""
    return torch.cat([gate_up, gate_up.new_zeros(gate_up.shape[0], width - gate_up.shape[1])], 1)


def of_projections(sums: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the scaled B of the projections but down, from the template's sums [rank, F]."""
    return [torch.cat([d.t() for d in sums])] if len(b) == 2 else [d.t() for d in sums]


def _joined(x, biases, a, b, scales, rows, activation, saved, through_down, through_wide, both, width) -> list[Tensor]:
    """The backward around the template.

    Args:
        saved: gate_up [T, 2F or F], xa and xa_down.
        through_down: (scale B) -> (d_act, dY B, dY).
        through_wide: ([d_gate_up | room], scale B's on a diagonal) -> (dX, d_gate_up B).
        both: where the gradient of gate_up is written, [T, width]; None to allocate it.
        width: columns of `both`.
    """
    from tunecompile.templates import lora_mlp as template

    gate_up, xa, xa_down = saved
    ranks = [m.shape[0] for m in a]
    d_act, gb, g = through_down(on_diagonal(b[DOWN], scales[DOWN], x.dtype))
    both, *db_wide, da_down = template.backward(d_act, gate_up, gb, xa, ranks[WIDE], activation, both=both, width=width)
    dx, gb = through_wide(both, on_diagonal(b[WIDE], scales[WIDE], x.dtype))
    da_wide = (gb.t() @ x.reshape(-1, x.shape[-1])).split(ranks[WIDE])
    d_a = (*da_wide, da_down)
    d_b = [d * scale for d, scale in zip((*of_projections(db_wide, b), g.t() @ xa_down), scales)]
    d_biases = bias_gradients(both[:, : sum(rows[WIDE])], g, rows, biases)
    return [dx.reshape(x.shape), *cast((*d_biases, *d_a, *d_b), (*biases, *a, *b))]


def cast(gradients: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return each gradient in the dtype of what it is of."""
    return [d.to(m.dtype) for d, m in zip(gradients, like)]
