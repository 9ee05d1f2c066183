"""A gated MLP with LoRA on its three projections as one op, so that its backward passes once over what is wide.

The gradients of gate and up are the largest tensors of a decoder layer. Joined, they are made together with the adapters' sums
over them (`templates/lora_mlp.py`), where the next product reads them.
"""

from typing import Sequence

import torch
from torch import Tensor

from tunecompile.op import Cost, has_triton, op
from tunecompile.ops import lora, lora_nf4
from tunecompile.ops.swiglu import gated_activation

MAX_RANK = 64  #: the template keeps three [columns, rank] sums in registers


class Base:
    """The frozen weights: dense ones, or the packed tensors of `lora_linear_nf4`. Indices: 0 gate, 1 up, 2 down."""

    def __init__(self, weights, packed, absmax, code, scale, offset, rows, blocksize, quant_type):
        self.weights, self.columns = weights, (packed, absmax, code, scale, offset)
        self.rows, self.blocksize, self.quant_type = rows, blocksize, quant_type

    def _packed(self, part: slice, like: Tensor, middle: tuple, width: int) -> tuple:
        rows = self.rows[part]
        return (like, *(column[part] for column in self.columns), *middle, rows, width, self.blocksize, self.quant_type)

    def dense(self, part: slice, like: Tensor, width: int) -> Sequence[Tensor]:
        """Each weight [rows, width] in the dtype of `like`."""
        if self.weights:
            return self.weights[part]
        _, *columns, rows, width, blocksize, quant_type = self._packed(part, like, (), width)
        return lora_nf4.reference_weights(*columns, rows, width, blocksize, quant_type, like.dtype)

    def extended(self, part: slice, like: Tensor, b: Sequence[Tensor], scales: Sequence[float], width: int) -> Tensor:
        """[W | scale B | 0]."""
        if self.weights:
            return lora.extended_weight(self.weights[part], b[part], scales[part], like.dtype)
        return lora_nf4.extended_weight(*self._packed(part, like, (b[part], scales[part]), width))

    def stacked(self, part: slice, like: Tensor, a: Sequence[Tensor], width: int) -> Tensor:
        """[W; A; 0]."""
        below = lora.below(a[part], sum(self.rows[part]), like.dtype)
        if self.weights:
            return torch.cat([*self.weights[part], below])
        return lora_nf4.stacked_weight(*self._packed(part, like, (below,), width))


WIDE, DOWN = slice(0, 2), slice(2, 3)


def forward_flops(x, weights, packed, absmax, code, scale, offset, a, b, scales, rows, *_) -> int:
    return 2 * (x.numel() // x.shape[-1]) * 3 * rows[0] * x.shape[-1]


def backward_flops(grad, x, *rest) -> int:
    return forward_flops(x, *rest)


@op(cost=Cost.MATMUL, flops=forward_flops)
def lora_mlp(x: Tensor, weights: Sequence[Tensor], packed: Sequence[Tensor], absmax: Sequence[Tensor], code: Sequence[Tensor],
             scale: Sequence[Tensor], offset: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor], scales: Sequence[float],
             rows: Sequence[int], blocksize: int, quant_type: str, activation: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, gate_up, xa, xa_down): y = down(activation(gate(x)) * up(x)), each a frozen linear with an adapter, as `lora_linear`.

    x: [..., K]; three each of a, b, scales and rows (F, F, K'), for gate, up and down. The weights are three dense ones, or, with
    `weights` empty, three packed ones as `lora_linear_nf4` takes them. Everything computes in x's dtype. gate_up: [..., 2F],
    xa: [T, r_gate + r_up], xa_down: [T, r_down].
    """
    base = Base(weights, packed, absmax, code, scale, offset, rows, blocksize, quant_type)
    gate_up, xa = lora.lora_linear.reference(x, [], base.dense(WIDE, x, x.shape[-1]), [], a[WIDE], b[WIDE], scales[WIDE], x.dtype)
    act = gated_activation.reference(*gate_up.split(list(rows[WIDE]), -1), activation)
    y, xa_down = lora.lora_linear.reference(act, [], base.dense(DOWN, x, rows[0]), [], a[DOWN], b[DOWN], scales[DOWN], x.dtype)
    return y, gate_up, xa, xa_down


def _supports(x, weights, packed, a, b, rows, activation) -> bool:
    return (x.is_cuda and x.dtype in lora.HALF and has_triton() and activation in ("silu", "gelu_tanh") and max(m.shape[0] for m in a) <= MAX_RANK
            and all(p.is_contiguous() for p in packed) and all(m.stride(-1) == 1 for m in (*a, *b)) and all(w.dtype == x.dtype for w in weights))


@lora_mlp.provider("joined", supports=lambda x, weights, packed, absmax, code, scale, offset, a, b, scales, rows, blocksize, quant_type, activation:
                   _supports(x, weights, packed, a, b, rows, activation))
def _(x, weights, packed, absmax, code, scale, offset, a, b, scales, rows, blocksize, quant_type, activation, *, used):
    """Both products by K extension; the activation is written where the second one reads it. Nobody computes y again."""
    from tunecompile.templates import lora as pieces
    from tunecompile.templates import swiglu

    base, inner = Base(weights, packed, absmax, code, scale, offset, rows, blocksize, quant_type), rows[0]
    wide, xa = lora.with_xa(x, [], a[WIDE], x.dtype)
    gate_up = wide @ base.extended(WIDE, x, b, scales, x.shape[-1]).t()
    if not (used[0] or used[3]):
        return None, gate_up.reshape(*x.shape[:-1], 2 * inner), xa, None
    act = torch.empty((wide.shape[0], lora.padded(inner + a[2].shape[0])), dtype=x.dtype, device=x.device)
    swiglu.forward(*gate_up.split(inner, 1), activation, out=act)
    xa_down = act[:, :inner] @ a[2].to(x.dtype).t()
    y = None
    if used[0]:
        pieces.append_columns(xa_down, act, inner)
        y = (act @ base.extended(DOWN, x, b, scales, inner).t()).reshape(*x.shape[:-1], rows[2])
    return y, gate_up.reshape(*x.shape[:-1], 2 * inner), xa, xa_down


@lora_mlp.backward(saves=("x", "weights", "packed", "absmax", "code", "scale", "offset", "a", "b", "scales", "rows", "blocksize", "quant_type",
                          "activation", "out1", "out2", "out3"), gives=("x", "a", "b"), flops=backward_flops)
def lora_mlp_backward(grad: Tensor, x: Tensor, weights: Sequence[Tensor], packed: Sequence[Tensor], absmax: Sequence[Tensor],
                      code: Sequence[Tensor], scale: Sequence[Tensor], offset: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor],
                      scales: Sequence[float], rows: Sequence[int], blocksize: int, quant_type: str, activation: str, out1: Tensor,
                      out2: Tensor, out3: Tensor) -> list[Tensor]:
    """[dx, dA of gate, up and down, dB of the same]."""
    base = Base(weights, packed, absmax, code, scale, offset, rows, blocksize, quant_type)
    gate, up = out1.split(list(rows[WIDE]), -1)
    act = gated_activation.reference(gate, up, activation)
    backward = lora.lora_linear.backward_op.reference
    d_act, da_down, db_down = backward(grad, act, [], base.dense(DOWN, x, rows[0]), [], a[DOWN], b[DOWN], scales[DOWN], x.dtype, out3)
    wide = torch.cat(gated_activation.backward_op.reference(d_act, gate, up, activation), -1)
    dx, da_gate, da_up, db_gate, db_up = backward(wide, x, [], base.dense(WIDE, x, x.shape[-1]), [], a[WIDE], b[WIDE], scales[WIDE], x.dtype, out2)
    return [dx, da_gate, da_up, da_down, db_gate, db_up, db_down]


@lora_mlp.backward_op.provider("joined", supports=lambda grad, x, weights, packed, absmax, code, scale, offset, a, b, scales, rows, blocksize, quant_type,
                               activation, out1, out2, out3: _supports(x, weights, packed, a, b, rows, activation))
def _(grad, x, weights, packed, absmax, code, scale, offset, a, b, scales, rows, blocksize, quant_type, activation, out1, out2, out3):
    from tunecompile.templates import lora as pieces
    from tunecompile.templates import lora_mlp as template

    base, inner = Base(weights, packed, absmax, code, scale, offset, rows, blocksize, quant_type), rows[0]
    scaled = [m.to(x.dtype) * s for m, s in zip(b, scales)]
    ranks = [m.shape[0] for m in a]
    wide, gb = lora.beside(grad, ranks[2], lambda g: g @ scaled[2])
    db_down = (wide[:, :grad.shape[-1]].t() @ out3) * scales[2]
    both, db_gate, db_up, da_down = template.backward(wide @ base.stacked(DOWN, x, a, inner), out1.reshape(-1, 2 * inner), gb, out2, ranks[:2],
                                                      activation, width=lora.padded(2 * inner + ranks[0] + ranks[1]))
    gb = both[:, :2 * inner] @ torch.block_diag(*scaled[WIDE])
    pieces.append_columns(gb, both, 2 * inner)
    dx = both @ base.stacked(WIDE, x, a, x.shape[-1])
    da_gate, da_up = (gb.t() @ x.reshape(-1, x.shape[-1])).split(ranks[:2])
    d_a, d_b = (da_gate, da_up, da_down), (db_gate.t() * scales[0], db_up.t() * scales[1], db_down)
    return [dx.reshape(x.shape), *(d.to(m.dtype) for d, m in zip(d_a, a)), *(d.to(m.dtype) for d, m in zip(d_b, b))]
