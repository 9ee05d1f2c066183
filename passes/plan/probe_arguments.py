"""Arguments of a few rows for ops that have templates: what `tunecompile.passes.plan.probe` tries a template with.

Sizes are the least that every template takes, and no multiples of a tile, so that masked ends are tried, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tunecompile.ir.eager_call import outputs
from tunecompile.ir.op import Op

__all__ = ["ARGUMENTS", "arguments_of"]

ROWS, WIDTH, EPS = 5, 1064, 1e-6


class _Draw:
    """Tensors with the same values each time, which leave the user's random state alone."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator, device="cpu") * scale).to(self.device, dtype or self.dtype)

    def codes(self, *shape: int, upto: int = 256) -> torch.Tensor:
        made = torch.randint(0, upto, shape, generator=self.generator, dtype=torch.uint8, device="cpu")
        return made.to(self.device)


def _norm(draw: _Draw, before: int, behind: tuple) -> list:
    """`before` tensors of rows, a weight, and the rest."""
    return [*(draw.normal(ROWS, WIDTH) for _ in range(before)), draw.normal(WIDTH), *behind]


def _modulated_norm(draw: _Draw, before: int) -> list:
    """Two rows of tokens, with scale and shift of their own; `before` tensors of them."""
    rows = [draw.normal(2, ROWS, WIDTH) for _ in range(before)]
    return [*rows, draw.normal(2, 1, WIDTH), draw.normal(2, 1, WIDTH), EPS, 1.0, True, draw.dtype]


def _nf4(draw: _Draw) -> list:
    rows, columns, block = 6, 192, 64
    scales = draw.normal(rows * columns // block, dtype=torch.float32).abs()
    return [draw.codes(rows * columns // 2, 1), scales, None, None, None, rows, columns, block, "nf4", draw.dtype]


def _mxfp4(draw: _Draw) -> list:
    rows, columns = 6, 96
    exponents = draw.codes(rows * columns // 32, upto=8) + 120
    return [draw.codes(rows * columns // 2), exponents, rows, columns, draw.dtype]


def _attention(draw: _Draw) -> list:
    """Two documents, and two heads that share a key."""
    q, k, v = (draw.normal(70, heads, 64) for heads in (2, 1, 1))
    offsets = torch.tensor([0, 33, 70], dtype=torch.int32, device=draw.device)
    return [q, k, v, offsets, 37, 0.125, 0, None, True, 30.0]


def _branches(draw: _Draw) -> list:
    """A prefix, two branches, and a row alone, under a window."""
    q, k, v = (draw.normal(70, heads, 64) for heads in (2, 1, 1))
    numbers = dict(dtype=torch.int32, device=draw.device)
    offsets = torch.tensor([0, 30, 40, 60, 70], **numbers)
    tree = torch.tensor([[-1, 0, 0, -1], [60, 40, 60, 70]], **numbers)
    places = torch.cat([torch.arange(*ends, **numbers) for ends in ((0, 40), (30, 50), (0, 10))])
    return [q, k, v, offsets, 30, tree, places, 0.125, 33, None, 30.0]


def _causal_attention(draw: _Draw) -> list:
    """Two rows, and two heads that share a key."""
    return [*(draw.normal(2, 70, heads, 64).transpose(1, 2) for heads in (2, 1, 1)), 0.125]


def _delta_rule(draw: _Draw) -> list:
    """A chunk and a half."""
    q, k, v = (draw.normal(1, 96, 2, 64) for _ in range(3))
    decay, beta = (draw.normal(1, 96, 2, dtype=torch.float32) for _ in range(2))
    return [q, k, v, -decay.abs() * 0.1, beta.sigmoid().to(draw.dtype), None, None, 0.125, EPS]


def _channel_rule(draw: _Draw) -> list:
    q, k, v, _, beta, *rest = _delta_rule(draw)
    return [q, k, v, -draw.normal(*q.shape, dtype=torch.float32).abs() * 0.1, beta, *rest]


def _selective_scan(draw: _Draw) -> list:
    """Two chunks and a half; more channels than one block of a program."""
    x, b, c = draw.normal(1, 80, 12), draw.normal(1, 80, 4), draw.normal(1, 80, 4)
    dt, a = draw.normal(1, 80, 12).abs(), draw.normal(12, 4, dtype=torch.float32)
    return [x, dt, -a.abs(), b, c, None, None]


def _lora_mlp(draw: _Draw) -> list:
    """Adapters of three ranks over dense weights of gate, up and down."""
    shapes, ranks = ((96, 64), (96, 64), (64, 96)), (4, 8, 3)
    weights = [draw.normal(n, k, scale=k**-0.5) for n, k in shapes]
    a = [draw.normal(r, k, scale=k**-0.5) for r, (_, k) in zip(ranks, shapes)]
    b = [draw.normal(n, r, scale=0.5) for r, (n, _) in zip(ranks, shapes)]
    sizes = [n for n, _ in shapes]
    return [draw.normal(ROWS, 64), weights, [], [], [], [], [], a, b, [0.5, 2.0, 1.5], sizes, 0, "", "silu"]


def _adapters(draw: _Draw) -> tuple[list, list, list]:
    """A, B and scale of two siblings of other heights and ranks, on inputs of 192 columns."""
    heights, ranks = (6, 10), (4, 3)
    a = [draw.normal(rank, 192, scale=192**-0.5) for rank in ranks]
    return a, [draw.normal(n, rank, scale=0.5) for n, rank in zip(heights, ranks)], [0.5, 2.0]


def _lora(draw: _Draw) -> list:
    weights = [draw.normal(n, 192, scale=192**-0.5) for n in (6, 10)]
    return [draw.normal(ROWS, 192), [], weights, [draw.normal(6), draw.normal(10)], *_adapters(draw), draw.dtype]


def _lora_nf4(draw: _Draw) -> list:
    heights, block = [6, 10], 64
    packed = [draw.codes(n * 192 // 2, 1) for n in heights]
    scales = [draw.normal(n * 192 // block, dtype=torch.float32).abs() * 192**-0.5 for n in heights]
    given = [draw.normal(ROWS, 192), [], packed, scales, [], [], [], []]
    return [*given, *_adapters(draw), draw.dtype, heights, block, "nf4"]


def _ssd_scan(draw: _Draw) -> list:
    """A chunk and a half, and two heads that share keys."""
    c, b, x = draw.normal(1, 96, 1, 64), draw.normal(1, 96, 1, 64, scale=0.1), draw.normal(1, 96, 2, 64)
    decay, dt = (draw.normal(1, 96, 2, dtype=torch.float32).abs() for _ in range(2))
    return [c, b, x, -decay * 0.1, dt, None, None]


def _row_losses(draw: _Draw) -> list:
    """Logits behind a soft cap, some without a label."""
    target = draw.codes(ROWS, upto=WIDTH % 256).long()
    target[1] = -100
    return [draw.normal(ROWS, WIDTH, scale=4.0), target, 0.5, 30.0, -100, 0.1]


TOKENS, CHOICES = 13, 2  #: and how many experts each has


def _experts(draw: _Draw) -> list:
    """A stack of four experts, of which one has no rows and one few, under two adapters; rows of nobody; biases."""
    experts, (n, k), ranks = 4, (96, 64), (4, 3)
    ends = torch.tensor([17, 17, 20, TOKENS * CHOICES - 2], dtype=torch.int32, device=draw.device)
    a = [draw.normal(experts * rank, k, scale=k**-0.5) for rank in ranks]
    b = [draw.normal(n, rank * experts, scale=0.5) for rank in ranks]
    return [draw.normal(experts, n, k, scale=k**-0.5), ends, a, b, [0.5, 2.0], False, draw.normal(experts, n)]


def _order(draw: _Draw) -> torch.Tensor:
    return torch.randperm(TOKENS * CHOICES, generator=draw.generator, device="cpu").to(draw.device)


def _gathered_backward(draw: _Draw) -> list:
    """Gradients that tokens share, of rows that are read from tokens."""
    order = _order(draw)
    sides = [draw.normal(TOKENS, 96), order, CHOICES, draw.normal(TOKENS, 64), order, CHOICES]
    inside = torch.arange(TOKENS * CHOICES, device=draw.device) < TOKENS * CHOICES - 2
    return [*sides, *_experts(draw), draw.normal(TOKENS * CHOICES, 16) * inside[:, None]]


#: op -> arguments of a small call. Those of its backward follow from them
ARGUMENTS: dict[str, Callable[[_Draw], list]] = {
    "rms_norm": lambda draw: _norm(draw, 1, (EPS, 0.0, True)),
    "add_rms_norm": lambda draw: _norm(draw, 2, (EPS, 0.0, True)),
    "layer_norm": lambda draw: _norm(draw, 1, (draw.normal(WIDTH), EPS, draw.dtype)),
    "add_layer_norm": lambda draw: _norm(draw, 2, (draw.normal(WIDTH), EPS, draw.dtype)),
    "modulated_norm": lambda draw: _modulated_norm(draw, 1),
    "add_modulated_norm": lambda draw: _modulated_norm(draw, 2),
    "gated_activation": lambda draw: [draw.normal(ROWS, WIDTH), draw.normal(ROWS, WIDTH), "silu"],
    "weighted_gate": lambda draw: [*(draw.normal(ROWS, n) for n in (WIDTH, WIDTH, 1)), "silu"],
    "clamped_gate": lambda draw: [draw.normal(ROWS, 2 * WIDTH), 1.702, 7.0],
    "dequantize_4bit": _nf4,
    "dequantize_mxfp4": _mxfp4,
    "varlen_attention": _attention,
    "branch_attention": _branches,
    "causal_attention": _causal_attention,
    "gated_delta_rule": _delta_rule,
    "channel_delta_rule": _channel_rule,
    "selective_scan": _selective_scan,
    "ssd_scan": _ssd_scan,
    "row_losses": _row_losses,
    "lora_linear": _lora,
    "lora_linear_nf4": _lora_nf4,
    "lora_mlp": _lora_mlp,
    "lora_mlp_tiled": lambda draw: [*_lora_mlp(draw), 2],
    "grouped_lora_linear": lambda draw: [draw.normal(TOKENS * CHOICES, 64), *_experts(draw)],
    "gathered_lora_linear": lambda draw: [draw.normal(TOKENS, 64), _order(draw), CHOICES, *_experts(draw)],
    "gathered_lora_linear_backward": _gathered_backward,
    "sum_rows": lambda draw: [draw.normal(TOKENS * CHOICES, 64), _order(draw), CHOICES, draw.dtype],
}


def arguments_of(op: Op, owner: Op | None, device: torch.device, dtype: torch.dtype) -> list | None:
    """Return the arguments of a small call of an op, or None where none are known.

    Args:
        op: the op.
        owner: the op whose backward it is; None for a forward.
        device: where they lie.
        dtype: of all that is in the model's precision.
    """
    make = ARGUMENTS.get((owner or op).name)
    if make is None:
        return None
    draw = _Draw(device, dtype)
    given = make(draw)
    if owner is None:
        return given
    made = outputs(owner.reference(*given))
    known = dict(zip(owner.parameters, given)) | {f"out{i}": value for i, value in enumerate(made)}
    gradients = [draw.normal(*each.shape, dtype=each.dtype) for each in made[: owner.formula.differentiable]]
    return [*gradients, *(known[name] for name in owner.formula.saves)]
