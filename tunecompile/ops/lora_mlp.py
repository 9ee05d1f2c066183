"""A gated MLP with LoRA on its three projections as one op, whose backward reads the wide tensors only once.

The gradients of gate and up are the largest tensors of a decoder layer. As one op they are computed together with the
adapters' gradients, which sum over them (`tunecompile.templates.lora_mlp`), and written where the next product reads
them. Gated linear
units: Shazeer, 2020, arXiv:2002.05202; adapters: Hu et al., 2021, arXiv:2106.09685.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile._torch.card import AMPERE, older_than
from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.ir.shape_rule_cache import contiguous_like
from tunecompile.notes import Note, note
from tunecompile.ops import lora
from tunecompile.ops.adapters.layout import on_diagonal, padded
from tunecompile.ops.eight_bits import FORMATS, EightBits
from tunecompile.ops.frozen_weights import DENSE, FrozenWeights, frozen_weights
from tunecompile.ops.packed import few_rows
from tunecompile.ops.swiglu import gated_activation, gated_activation_backward

__all__ = ["lora_mlp", "lora_mlp_backward"]

MAX_RANK = 64  #: the template keeps three [columns, rank] sums in registers


WIDE, DOWN = slice(None, -1), slice(-1, None)  #: gate and up, or the one projection to both; and down, in lists


def inner_width(b: Sequence[Tensor]) -> int:
    """Return F, the width of the activation: half of what gate and up give together."""
    return sum(m.shape[0] for m in b[WIDE]) // 2


def both_weights(
    weights: Sequence, stored: str, rows: Sequence[int], columns: int, dtype: torch.dtype
) -> tuple[FrozenWeights, FrozenWeights]:
    """Return the frozen weights of gate|up and of down, from arguments as `frozen_weights` takes them for both."""
    last, inner = 1 if stored == DENSE else len(weights) // len(rows), sum(rows[WIDE]) // 2
    wide = frozen_weights(weights[:-last], stored, rows[WIDE], columns, dtype)
    return wide, frozen_weights(weights[-last:], stored, rows[DOWN], inner, dtype)


def frozen_of(x: Tensor, weights, b, stored: str) -> tuple[FrozenWeights, FrozenWeights]:
    """Return the frozen weights of gate|up and of down, from the arguments of `lora_mlp`."""
    return both_weights(weights, stored, [m.shape[0] for m in b], x.shape[-1], x.dtype)


def forward_flops(x, weights, a, b, *_) -> int:
    """Count the three base products; adapters are left out."""
    return 2 * (x.numel() // x.shape[-1]) * 3 * inner_width(b) * x.shape[-1]


def backward_flops(grad, x, *rest) -> int:
    """Count the gradients of the three products' inputs: as much as the forward."""
    return forward_flops(x, *rest)


def _shapes(x, weights, a, b, *_) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gate_up, xa = lora.shapes(x, a[WIDE], b[WIDE], x.dtype)
    y, xa_down = lora.shapes(x, a[DOWN], b[DOWN], x.dtype)
    return y, gate_up, xa, xa_down


def _backward_shapes(grad, x, weights, a, b, *_) -> list[Tensor]:
    return contiguous_like(x, *a, *b)


def _example(draw) -> list:
    """Adapters of three ranks over dense weights of gate, up and down."""
    shapes, ranks = ((96, 64), (96, 64), (64, 96)), (4, 8, 3)
    weights = [draw.normal(n, k, scale=k**-0.5) for n, k in shapes]
    a = [draw.normal(r, k, scale=k**-0.5) for r, (_, k) in zip(ranks, shapes)]
    b = [draw.normal(n, r, scale=0.5) for r, (n, _) in zip(ranks, shapes)]
    return [draw.normal(draw.rows, 64), weights, a, b, [0.5, 2.0, 1.5], DENSE, "silu"]


@op(cost=Cost.MATMUL, flops=forward_flops, shapes=_shapes, example=_example)
def lora_mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    stored: str,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return down(activation(gate(x)) * up(x)), where each projection is a linear with an adapter.

    All arithmetic is in x's dtype, adapters included, as in `tunecompile.ops.lora.lora_linear`. Lists have one member
    each for gate, up and down, in this order; or two, where one projection with one adapter gives gate | up. (Gated
    linear units: arXiv:2002.05202; adapters: arXiv:2106.09685.)

    Args:
        x: [..., K], any floating dtype; T tokens in all.
        weights: dense ones, [F, K], [F, K] and [K', F], or [2F, K] and [K', F], in x's dtype; or two matrices that
            hold weights and adapters, of gate|up and of down (`tunecompile.ops.frozen_weights`); or the tensors of
            weights in 4 bits, one weight's after the other's.
        a: A of each adapter, [r_gate, K], [r_up, K] and [r_down, F], any floating dtype; or [r, K] and [r_down, F].
        b: B of each adapter, [F, r_gate], [F, r_up] and [K', r_down], any floating dtype; or [2F, r] and [K', r_down].
        scales: factors, one an adapter.
        stored: how the weights are stored, as for `tunecompile.ops.lora.lora_linear`.
        activation: "silu", "gelu" or "gelu_tanh", as for `tunecompile.ops.swiglu.gated_activation`.

    Returns:
        (y, gate_up, xa, xa_down) in x's dtype: [..., K'], [..., 2F], [T, r_gate + r_up] (or [T, r]) and [T, r_down].
        Only y gets a gradient; the others are for the backward.
    """
    wide, down = frozen_of(x, weights, b, stored)
    reference = lora.lora_linear.reference
    gate_up, xa = reference(x, [], wide.members(), [], a[WIDE], b[WIDE], scales[WIDE], x.dtype, DENSE)
    act = gated_activation.reference(*gate_up.split(inner_width(b), -1), activation)
    y, xa_down = reference(act, [], down.members(), [], a[DOWN], b[DOWN], scales[DOWN], x.dtype, DENSE)
    return y, gate_up, xa, xa_down


def _refuse(x, weights, a, b, stored, activation) -> Note | None:
    """Why the template cannot run, or None."""
    if reason := refuse_gpu(x):
        return reason
    if older_than(x.device, AMPERE):
        return note("gpu-before-ampere")
    if activation not in ("silu", "gelu_tanh"):
        return note("activation-not-supported", detail=activation)
    if (rank := max(m.shape[0] for m in a)) > MAX_RANK:
        return note("rank-too-large", rank=rank, limit=MAX_RANK)
    read = all(frozen.contiguous for frozen in frozen_of(x, weights, b, stored))
    if not read or not all(m.stride(-1) == 1 for m in (*a, *b)):
        return note("not-contiguous", "weights or adapters are")
    same = stored != DENSE or all(w.dtype == x.dtype for w in weights)
    return None if same else note("dtypes-differ", "weights and activations")


def _refuse_few(x, weights, a, b, stored) -> Note | None:
    pieces = zip((WIDE, DOWN), frozen_of(x, weights, b, stored))
    found = (few_rows.refuse(x, frozen, a[of], b[of]) for of, frozen in pieces)
    return next((reason for reason in found if reason), None)


@lora_mlp.provider("few_rows", because=few_rows.BECAUSE, refuses=_refuse_few)
def _(x, weights, a, b, scales, stored, activation, *, used):
    """Two launches for gate and up, two for down, and the activation between them."""
    (wide, down), inner = frozen_of(x, weights, b, stored), inner_width(b)
    tokens = x.reshape(-1, x.shape[-1]).contiguous()
    gate_up, xa = few_rows.product(tokens, wide, a[WIDE], b[WIDE], scales[WIDE])
    if not (used[0] or used[3]):
        return None, gate_up.reshape(*x.shape[:-1], 2 * inner), xa, None
    act = gated_activation.reference(*gate_up.split(inner, -1), activation).contiguous()
    y, xa_down = few_rows.product(act, down, a[DOWN], b[DOWN], scales[DOWN])
    return y.reshape(*x.shape[:-1], down.height), gate_up.reshape(*x.shape[:-1], 2 * inner), xa, xa_down


@lora_mlp.provider(
    "joined",
    because="the activation is written where the second product reads it",
    refuses=_refuse,
)
def _(x, weights, a, b, scales, stored, activation, *, used):
    """Both products by K extension; the activation is written where the second one reads it. y is not recomputed."""
    (gate_and_up, down), inner = frozen_of(x, weights, b, stored), inner_width(b)
    gate_up, xa = lora.product(x, [], gate_and_up, a[WIDE], b[WIDE], scales[WIDE], x.dtype)
    if not (used[0] or used[3]):
        return None, gate_up.reshape(*x.shape[:-1], 2 * inner), xa, None
    act = torch.empty((gate_up.shape[0], padded(inner + a[-1].shape[0])), dtype=x.dtype, device=x.device)
    templates.swiglu.forward(*gate_up.split(inner, 1), activation, out=act)
    xa_down = act[:, :inner] @ a[-1].to(x.dtype).t()
    y = None
    if used[0]:
        if (weights := down.without_copy(act.shape[0])) is not None:
            y = lora.with_term(act[:, :inner], xa_down, weights, b[DOWN], scales[DOWN])
        else:
            templates.lora.append_columns(xa_down, act, inner)
            y = act @ down.extended(b[DOWN], scales[DOWN], x.dtype).t()
        y = y.reshape(*x.shape[:-1], down.height)
    return y, gate_up.reshape(*x.shape[:-1], 2 * inner), xa, xa_down


def _refuse_in(eight: EightBits, x, weights, a, b, stored, activation) -> Note | None:
    if _refuse(x, weights, a, b, stored, activation):
        return note("backward-not-joined")
    found = (lora.refuse_in(eight, x, frozen) for frozen in frozen_of(x, weights, b, stored))
    return next((reason for reason in found if reason), None)


def _forward_in(eight: EightBits) -> None:
    @lora_mlp.provider(
        f"joined_{eight.name}", precision=eight.name, because=eight.because, refuses=partial(_refuse_in, eight)
    )
    def _(x, weights, a, b, scales, stored, activation, *, used):
        """As "joined", the frozen products in 8 bits."""
        (wide, down), inner, lead = frozen_of(x, weights, b, stored), inner_width(b), x.shape[:-1]
        tokens = x.reshape(-1, x.shape[-1])
        xa = tokens @ torch.cat([m.to(x.dtype) for m in a[WIDE]]).t()
        gate_up = eight.product(tokens, xa, wide, on_diagonal(b[WIDE], scales[WIDE], x.dtype), False)
        if not (used[0] or used[3]):
            return None, gate_up.reshape(*lead, 2 * inner), xa, None
        act = templates.swiglu.forward(*gate_up.split(inner, 1), activation)
        xa_down, y = act @ a[-1].to(x.dtype).t(), None
        if used[0]:
            y = eight.product(act, xa_down, down, on_diagonal(b[DOWN], scales[DOWN], x.dtype), False)
            y = y.reshape(*lead, down.height)
        return y, gate_up.reshape(*lead, 2 * inner), xa, xa_down


@lora_mlp.backward(gives=("x", "a", "b"), flops=backward_flops, shapes=_backward_shapes)
def lora_mlp_backward(grad, x, weights, a, b, scales, stored, activation, out1, out2, out3) -> list[Tensor]:
    """Return the gradients of `lora_mlp`; the activation is recomputed from gate_up.

    Args:
        grad: of y, [..., K'] in its dtype.
        out1: gate_up, out2: xa, out3: xa_down, as `lora_mlp` returned them. The others are its inputs.

    Returns:
        [dx, dA of each projection, dB of the same], each with the shape and dtype of its input.
    """
    wide, down = frozen_of(x, weights, b, stored)
    gate, up = out1.split(inner_width(b), -1)
    act = gated_activation.reference(gate, up, activation)

    def through(g, source, frozen, of, xa):
        adapters = (a[of], b[of], scales[of], x.dtype, DENSE)
        return lora.lora_linear_backward.reference(g, source, [], frozen.members(), [], *adapters, xa)

    d_act, da_down, db_down = through(grad, act, down, DOWN, out3)
    both = torch.cat(gated_activation_backward.reference(d_act, gate, up, activation), -1)
    dx, *adapters = through(both, x, wide, WIDE, out2)
    count = len(a) - 1
    return [dx, *adapters[:count], da_down, *adapters[count:], db_down]


@lora_mlp_backward.provider(
    "joined",
    because="the adapters' sums are taken in the pass that makes the gradients: 0.47 ms, apart 0.54 (8192x14336, H200)",
    refuses=_refuse,
)
def _(grad, x, weights, a, b, scales, stored, activation, out1, out2, out3, *, dying=()):
    (gate_and_up, down), inner = frozen_of(x, weights, b, stored), inner_width(b)

    def through_down(adapter):
        return lora.base_gradient(down, a[DOWN], x.dtype)(grad, adapter, True)

    def through_wide(both, adapter):
        g = both[:, : 2 * inner]
        gb = g @ adapter
        if gate_and_up.adds(both.shape[0]):
            return lora.sum_of_products(g, gb, gate_and_up, a[WIDE]), gb
        templates.lora.append_columns(gb, both, 2 * inner)
        return both @ gate_and_up.stacked(a[WIDE], x.dtype), gb

    width = padded(2 * inner + sum(m.shape[0] for m in a[WIDE]))
    gate_up = out1.reshape(-1, 2 * inner)
    both = with_room(gate_up, width) if "out1" in dying else None
    gate_up = gate_up if both is None else both[:, : 2 * inner]
    saved = (gate_up, out2, out3)
    return _joined(x, a, b, scales, activation, saved, through_down, through_wide, both, width)


def _backward_in(eight: EightBits) -> None:
    @lora_mlp_backward.provider(
        f"joined_{eight.name}", precision=eight.name, because=eight.because, refuses=partial(_refuse_in, eight)
    )
    def _(grad, x, weights, a, b, scales, stored, activation, out1, out2, out3):
        wide, down = frozen_of(x, weights, b, stored)

        def product(frozen, g, adapter, a):
            gb = g @ adapter
            return eight.product(g, gb, frozen, torch.cat([m.to(x.dtype) for m in a]).t(), True), gb

        def through_down(adapter):
            g = grad.reshape(-1, grad.shape[-1])
            return *product(down, g, adapter, a[DOWN]), g

        def through_wide(both, adapter):
            return product(wide, both, adapter, a[WIDE])

        saved = (out1.reshape(-1, wide.height), out2, out3)
        return _joined(x, a, b, scales, activation, saved, through_down, through_wide, None, wide.height)


for each in FORMATS:
    _forward_in(each)
    _backward_in(each)


def with_room(gate_up: Tensor, width: int) -> Tensor:
    """Return [gate | up | 0], to be overwritten by its gradient. Inductor makes a product write there directly."""
    return torch.cat([gate_up, gate_up.new_zeros(gate_up.shape[0], width - gate_up.shape[1])], 1)


def of_projections(sums: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the scaled B of the projections to gate and up, from the template's sums [rank, F]."""
    return [torch.cat([d.t() for d in sums])] if len(b) == 2 else [d.t() for d in sums]


def _joined(x, a, b, scales, activation, saved, through_down, through_wide, both, width) -> list[Tensor]:
    """The backward around the template.

    Args:
        saved: gate_up [T, 2F], xa and xa_down.
        through_down: (scale B) -> (d_act, dY B, dY).
        through_wide: ([d_gate | d_up | room], scale B's on a diagonal) -> (dX, d_gate B | d_up B).
        both: where the gradient of gate_up is written, [T, width]; None to allocate it.
        width: columns of `both`.
    """
    gate_up, xa, xa_down = saved
    ranks = [m.shape[0] for m in a]
    d_act, gb, g = through_down(on_diagonal(b[DOWN], scales[DOWN], x.dtype))
    both, *db_wide, da_down = templates.lora_mlp.backward(
        d_act, gate_up, gb, xa, ranks[WIDE], activation, both=both, width=width
    )
    dx, gb = through_wide(both, on_diagonal(b[WIDE], scales[WIDE], x.dtype))
    da_wide = (gb.t() @ x.reshape(-1, x.shape[-1])).split(ranks[WIDE])
    d_a = (*da_wide, da_down)
    d_b = [d * scale for d, scale in zip((*of_projections(db_wide, b), g.t() @ xa_down), scales)]
    return [dx.reshape(x.shape), *(d.to(m.dtype) for d, m in zip(d_a, a)), *(d.to(m.dtype) for d, m in zip(d_b, b))]
