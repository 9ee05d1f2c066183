"""A gated MLP with LoRA on its three projections as one op, so that its backward passes once over what is wide.

The gradients of gate and up are the largest tensors of a decoder layer. Joined, they are made together with the adapters' sums
over them (`tunecompile.templates.lora_mlp`), where the next product reads them. Gated linear units: Shazeer, 2020, arXiv:2002.05202;
adapters: Hu et al., 2021, arXiv:2106.09685.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.notes import Note, note
from tunecompile.ops import fp8, lora, lora_nf4
from tunecompile.ops.swiglu import gated_activation

__all__ = ["lora_mlp", "lora_mlp_backward"]

MAX_RANK = 64  #: the template keeps three [columns, rank] sums in registers


class Base:
    """The frozen weights: dense ones, the packed tensors of `lora_linear_nf4`, or two matrices in which they stand with adapters, of gate|up and
    of down (see `lora_linear`). Indices: 0 gate, 1 up, 2 down."""

    def __init__(self, weights, packed, absmax, code, scale, offset, rows, blocksize, quant_type):
        self.weights, self.columns = weights, (packed, absmax, code, scale, offset)
        self.rows, self.blocksize, self.quant_type = rows, blocksize, quant_type

    @property
    def roomy(self) -> bool:
        return len(self.weights) == 2

    def _matrix(self, part: slice) -> Tensor:
        return self.weights[0 if part == WIDE else 1]

    def _packed(self, part: slice, like: Tensor, middle: tuple, width: int) -> tuple:
        rows = self.rows[part]
        return (like, *(column[part] for column in self.columns), *middle, rows, width, self.blocksize, self.quant_type)

    def dense(self, part: slice, like: Tensor, width: int) -> Sequence[Tensor]:
        """Each weight [rows, width] in the dtype of `like`."""
        if self.roomy:
            return self._matrix(part)[: sum(self.rows[part]), :width].split(list(self.rows[part]))
        if self.weights:
            return self.weights[part]
        _, *columns, rows, width, blocksize, quant_type = self._packed(part, like, (), width)
        return lora_nf4.reference_weights(*columns, rows, width, blocksize, quant_type, like.dtype)

    def product(
        self, part: slice, wide: Tensor, xa: Tensor, b: Sequence[Tensor], scales: Sequence[float], width: int
    ) -> Tensor:
        """[x | xa | 0] @ [W | scale B | 0]^T, [T, all rows]."""
        if not self.weights:
            return wide @ lora_nf4.extended_weight(*self._packed(part, wide, (b[part], scales[part]), width)).t()
        weights = [self._matrix(part)] if self.roomy else self.weights[part]
        if (weight := lora.unextended(wide[:, :width], weights, b[part])) is not None:
            return torch.addmm(xa @ lora.on_diagonal(b[part], scales[part], xa.dtype).t(), wide[:, :width], weight.t())
        return wide @ lora.extended(weights, b[part], scales[part], wide.dtype, width).t()

    def stacked(self, part: slice, like: Tensor, a: Sequence[Tensor], width: int) -> Tensor:
        """[W; A; 0]."""
        if self.roomy:
            return self._matrix(part)[:, :width]
        below = lora.below(a[part], sum(self.rows[part]), like.dtype)
        if self.weights:
            return torch.cat([*self.weights[part], below])
        return lora_nf4.stacked_weight(*self._packed(part, like, (below,), width))

    def written(
        self,
        part: slice,
        like: Tensor,
        b: Sequence[Tensor],
        scales: Sequence[float],
        width: int,
        below: Tensor | None = None,
    ) -> Tensor:
        """[W | scale B | 0], by kernels that write into one buffer; in its first `width` columns `below` may stand under W, for the bytes of one."""
        if self.weights:
            return lora.written_weight(self.weights[part], b[part], scales[part], like.dtype, below)
        return lora_nf4.extended_weight(*self._packed(part, like, (b[part], scales[part]), width), below=below)

    def in_fp8(self, part: slice, like: Tensor, width: int) -> fp8.Operand:
        """Both directions of [W | what is beside it] in e4m3."""
        if self.weights:
            return fp8.dense_operand(self.weights[part])
        _, *columns, rows, width, blocksize, quant_type = self._packed(part, like, (), width)
        return lora_nf4.operand_in_fp8(*columns, rows, width, blocksize, quant_type, like.dtype)


WIDE, DOWN = slice(0, 2), slice(2, 3)


def forward_flops(x, weights, packed, absmax, code, scale, offset, a, b, scales, rows, *_) -> int:
    return 2 * (x.numel() // x.shape[-1]) * 3 * rows[0] * x.shape[-1]


def backward_flops(grad, x, *rest) -> int:
    return forward_flops(x, *rest)


@op(cost=Cost.MATMUL, flops=forward_flops)
def lora_mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    packed: Sequence[Tensor],
    absmax: Sequence[Tensor],
    code: Sequence[Tensor],
    scale: Sequence[Tensor],
    offset: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    rows: Sequence[int],
    blocksize: int,
    quant_type: str,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """down(activation(gate(x)) * up(x)): each projection is a frozen linear with an adapter, as `tunecompile.ops.lora.lora_linear`.

    Everything computes in x's dtype, adapters too. Lists have one member each for gate, up and down, in this order.
    (Gated linear units: arXiv:2002.05202; adapters: arXiv:2106.09685.)

    Args:
        x: [..., K], any floating dtype; T tokens in all.
        weights: three dense ones, [F, K], [F, K] and [K', F] in x's dtype; or two matrices with adapters (see `lora_linear`), of gate|up and
            of down; or empty, where packed ones are given.
        packed: uint8, three, or empty. This and absmax, code, scale, offset, blocksize and quant_type: as for
            `tunecompile.ops.lora_nf4.lora_linear_nf4`.
        a: A of each adapter, [r_gate, K], [r_up, K] and [r_down, F], any floating dtype.
        b: B of each adapter, [F, r_gate], [F, r_up] and [K', r_down], any floating dtype.
        scales: factors, one an adapter.
        rows: (F, F, K').
        activation: "silu", "gelu" or "gelu_tanh", as for `tunecompile.ops.swiglu.gated_activation`.

    Returns:
        (y, gate_up, xa, xa_down) in x's dtype: [..., K'], [..., 2F], [T, r_gate + r_up] and [T, r_down]. Only y gets a gradient; the others
        are for the backward.
    """
    base = Base(weights, packed, absmax, code, scale, offset, rows, blocksize, quant_type)
    gate_up, xa = lora.lora_linear.reference(
        x, [], base.dense(WIDE, x, x.shape[-1]), [], a[WIDE], b[WIDE], scales[WIDE], x.dtype
    )
    act = gated_activation.reference(*gate_up.split(list(rows[WIDE]), -1), activation)
    y, xa_down = lora.lora_linear.reference(
        act, [], base.dense(DOWN, x, rows[0]), [], a[DOWN], b[DOWN], scales[DOWN], x.dtype
    )
    return y, gate_up, xa, xa_down


def _refuse(x, weights, packed, a, b, activation) -> Note | None:
    """Why the template cannot join them, if it cannot."""
    if reason := refuse_gpu(x):
        return reason
    if activation not in ("silu", "gelu_tanh"):
        return note("activation-not-supported", detail=activation)
    if (rank := max(m.shape[0] for m in a)) > MAX_RANK:
        return note("rank-too-large", rank=rank, limit=MAX_RANK)
    if not all(p.is_contiguous() for p in packed) or not all(m.stride(-1) == 1 for m in (*weights, *a, *b)):
        return note("not-contiguous", "weights or adapters are")
    return None if all(w.dtype == x.dtype for w in weights) else note("dtypes-differ", "weights and activations")


@lora_mlp.provider(
    "joined",
    because="the activation is written where the second product reads it",
    refuses=lambda x, weights, packed, absmax, code, scale, offset, a, b, scales, rows, blocksize, quant_type, activation: (
        _refuse(x, weights, packed, a, b, activation)
    ),
)
def _(x, weights, packed, absmax, code, scale, offset, a, b, scales, rows, blocksize, quant_type, activation, *, used):
    """Both products by K extension; the activation is written where the second one reads it. Nobody computes y again."""
    from tunecompile.templates import lora as pieces
    from tunecompile.templates import swiglu

    base, inner = Base(weights, packed, absmax, code, scale, offset, rows, blocksize, quant_type), rows[0]
    wide, xa = lora.with_xa(x, [], a[WIDE], x.dtype)
    gate_up = base.product(WIDE, wide, xa, b, scales, x.shape[-1])
    if not (used[0] or used[3]):
        return None, gate_up.reshape(*x.shape[:-1], 2 * inner), xa, None
    act = torch.empty((wide.shape[0], lora.padded(inner + a[2].shape[0])), dtype=x.dtype, device=x.device)
    swiglu.forward(*gate_up.split(inner, 1), activation, out=act)
    xa_down = act[:, :inner] @ a[2].to(x.dtype).t()
    y = None
    if used[0]:
        pieces.append_columns(xa_down, act, inner)
        y = base.product(DOWN, act, xa_down, b, scales, inner).reshape(*x.shape[:-1], rows[2])
    return y, gate_up.reshape(*x.shape[:-1], 2 * inner), xa, xa_down


def _refuse_fp8(x, weights, packed, a, b, rows, activation) -> Note | None:
    if _refuse(x, weights, packed, a, b, activation):
        return note("backward-not-joined")
    return lora_nf4.refuse_fp8(x, packed, rows[WIDE]) or lora_nf4.refuse_fp8(x, packed, rows[DOWN])


@lora_mlp.provider(
    "joined_fp8",
    precision="fp8",
    because=fp8.BECAUSE,
    refuses=lambda x, weights, packed, absmax, code, scale, offset, a, b, scales, rows, blocksize, quant_type, activation: (
        _refuse_fp8(x, weights, packed, a, b, rows, activation)
    ),
)
def _(x, weights, packed, absmax, code, scale, offset, a, b, scales, rows, blocksize, quant_type, activation, *, used):
    """As "joined", the frozen products in e4m3."""
    from tunecompile.templates import swiglu

    base, inner, lead = (
        Base(weights, packed, absmax, code, scale, offset, rows, blocksize, quant_type),
        rows[0],
        x.shape[:-1],
    )
    xa, *tokens = fp8.project(x.reshape(-1, x.shape[-1]), torch.cat([m.to(x.dtype) for m in a[WIDE]]), x.dtype)
    gate_up = fp8.product(
        *tokens,
        *base.in_fp8(WIDE, x, x.shape[-1])(lora.on_diagonal(b[WIDE], scales[WIDE], x.dtype), False),
        fp8.FAST_FORWARD,
    )
    y = xa_down = None
    if used[0] or used[3]:
        act = swiglu.forward(*gate_up.split(inner, 1), activation)
        xa_down = act @ a[2].to(x.dtype).t()
    if used[0]:
        adapter = lora.on_diagonal(b[DOWN], scales[DOWN], x.dtype)
        y = fp8.product(
            *fp8.quantize(act, xa_down), *base.in_fp8(DOWN, x, inner)(adapter, False), fp8.FAST_FORWARD
        ).reshape(*lead, rows[2])
    return y, gate_up.reshape(*lead, 2 * inner), xa, xa_down


@lora_mlp.backward(
    saves=(
        "x",
        "weights",
        "packed",
        "absmax",
        "code",
        "scale",
        "offset",
        "a",
        "b",
        "scales",
        "rows",
        "blocksize",
        "quant_type",
        "activation",
        "out1",
        "out2",
        "out3",
    ),
    gives=("x", "a", "b"),
    flops=backward_flops,
)
def lora_mlp_backward(
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    packed: Sequence[Tensor],
    absmax: Sequence[Tensor],
    code: Sequence[Tensor],
    scale: Sequence[Tensor],
    offset: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    rows: Sequence[int],
    blocksize: int,
    quant_type: str,
    activation: str,
    out1: Tensor,
    out2: Tensor,
    out3: Tensor,
) -> list[Tensor]:
    """The gradients of `lora_mlp`; the activation is computed again from gate_up.

    Args:
        grad: of y, [..., K'] in its dtype.
        out1: gate_up, out2: xa, out3: xa_down, as `lora_mlp` returned them. The others are its inputs.

    Returns:
        [dx, dA of gate, up and down, dB of the same], in shape and dtype of what they are gradients of.
    """
    base = Base(weights, packed, absmax, code, scale, offset, rows, blocksize, quant_type)
    gate, up = out1.split(list(rows[WIDE]), -1)
    act = gated_activation.reference(gate, up, activation)
    backward = lora.lora_linear.backward_op.reference
    d_act, da_down, db_down = backward(
        grad, act, [], base.dense(DOWN, x, rows[0]), [], a[DOWN], b[DOWN], scales[DOWN], x.dtype, out3
    )
    wide = torch.cat(gated_activation.backward_op.reference(d_act, gate, up, activation), -1)
    dx, da_gate, da_up, db_gate, db_up = backward(
        wide, x, [], base.dense(WIDE, x, x.shape[-1]), [], a[WIDE], b[WIDE], scales[WIDE], x.dtype, out2
    )
    return [dx, da_gate, da_up, da_down, db_gate, db_up, db_down]


@lora_mlp.backward_op.provider(
    "joined",
    because="the adapters' sums are taken in the pass that makes the gradients: 0.47 ms, apart 0.54 (8192x14336, H200)",
    refuses=lambda grad, x, weights, packed, absmax, code, scale, offset, a, b, scales, rows, blocksize, quant_type, activation, *_: (
        _refuse(x, weights, packed, a, b, activation)
    ),
)
def _(
    grad,
    x,
    weights,
    packed,
    absmax,
    code,
    scale,
    offset,
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
    *,
    dying=(),
):
    from tunecompile.templates import lora as pieces

    base = Base(weights, packed, absmax, code, scale, offset, rows, blocksize, quant_type)

    def through_down(adapter):
        wide, gb = lora.beside(grad, adapter.shape[1], lambda g: g @ adapter)
        return wide @ base.stacked(DOWN, x, a, rows[0]), gb, wide[:, : grad.shape[-1]]

    def through_wide(both, adapter):
        gb = both[:, : 2 * rows[0]] @ adapter
        pieces.append_columns(gb, both, 2 * rows[0])
        return both @ base.stacked(WIDE, x, a, x.shape[-1]), gb

    width = lora.padded(sum(rows[WIDE]) + a[0].shape[0] + a[1].shape[0])
    gate_up = out1.reshape(-1, sum(rows[WIDE]))
    both = with_room(gate_up, width) if "out1" in dying else None
    return _joined(
        x,
        a,
        b,
        scales,
        rows[0],
        activation,
        gate_up if both is None else both[:, : sum(rows[WIDE])],
        out2,
        out3,
        through_down,
        through_wide,
        both,
        width,
    )


@lora_mlp.backward_op.provider(
    "joined_fp8",
    precision="fp8",
    because=fp8.BECAUSE,
    refuses=lambda grad, x, weights, packed, absmax, code, scale, offset, a, b, scales, rows, blocksize, quant_type, activation, *_: (
        _refuse_fp8(x, weights, packed, a, b, rows, activation)
    ),
)
def _(
    grad,
    x,
    weights,
    packed,
    absmax,
    code,
    scale,
    offset,
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
):
    base = Base(weights, packed, absmax, code, scale, offset, rows, blocksize, quant_type)

    def product(part, g, adapter, width):
        gb, *tokens = fp8.project(g, adapter.t(), x.dtype)
        return fp8.product(
            *tokens,
            *base.in_fp8(part, x, width)(torch.cat([m.to(x.dtype) for m in a[part]]).t(), True),
            fp8.FAST_BACKWARD,
        ), gb

    def through_down(adapter):
        g = grad.reshape(-1, grad.shape[-1])
        return *product(DOWN, g, adapter, rows[0]), g

    def through_wide(both, adapter):
        return product(WIDE, both, adapter, x.shape[-1])

    return _joined(
        x,
        a,
        b,
        scales,
        rows[0],
        activation,
        out1.reshape(-1, sum(rows[WIDE])),
        out2,
        out3,
        through_down,
        through_wide,
        None,
        sum(rows[WIDE]),
    )


def with_room(gate_up: Tensor, width: int) -> Tensor:
    """[gate | up | 0], for its gradient to take its place. Inductor lets a product write there, so that nothing is copied."""
    return torch.cat([gate_up, gate_up.new_zeros(gate_up.shape[0], width - gate_up.shape[1])], 1)


def _joined(
    x, a, b, scales, inner, activation, gate_up, xa, xa_down, through_down, through_wide, both, width
) -> list[Tensor]:
    """The backward around the template. through_down(scale B) -> (d_act, dY B, dY); through_wide([d_gate | d_up | room], scale B's on a
    diagonal) -> (dX, d_gate B | d_up B). both: where the gradient of gate_up [T, 2F] is written, [T, width]; None to take new memory."""
    from tunecompile.templates import lora_mlp as template

    ranks = [m.shape[0] for m in a]
    d_act, gb, g = through_down(lora.on_diagonal(b[DOWN], scales[DOWN], x.dtype))
    both, db_gate, db_up, da_down = template.backward(
        d_act, gate_up, gb, xa, ranks[:2], activation, both=both, width=width
    )
    dx, gb = through_wide(both, lora.on_diagonal(b[WIDE], scales[WIDE], x.dtype))
    da_gate, da_up = (gb.t() @ x.reshape(-1, x.shape[-1])).split(ranks[:2])
    d_a, d_b = (
        (da_gate, da_up, da_down),
        (db_gate.t() * scales[0], db_up.t() * scales[1], (g.t() @ xa_down) * scales[2]),
    )
    return [dx.reshape(x.shape), *(d.to(m.dtype) for d, m in zip(d_a, a)), *(d.to(m.dtype) for d, m in zip(d_b, b))]
