"""Operands for templates and independent references of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tunecompile.templates import nf4

NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
FP4 = [v / 12 for v in (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)]
CODES = {"nf4": NF4, "fp4": FP4}


class Weight:
    """Random packed weights, with absmax in fp32 or double-quantised."""

    def __init__(self, n, k, device, *, blocksize=64, nested=True, quant_type="nf4", seed=0):
        g = torch.Generator().manual_seed(seed)
        elements = n * k
        blocks = -(-elements // blocksize)
        self.shape, self.blocksize, self.quant_type = (n, k), blocksize, quant_type
        self.packed = torch.randint(0, 256, ((elements + 1) // 2, 1), generator=g, dtype=torch.uint8).to(device)
        if nested:
            self.absmax = torch.randint(0, 256, (blocks,), generator=g, dtype=torch.uint8).to(device)
            self.nested = dict(
                absmax_code=torch.linspace(-1, 1, 256).pow(3).to(device),
                absmax_scale=torch.rand(-(-blocks // 256), generator=g).add(0.1).to(device),
                absmax_offset=torch.tensor(0.7, device=device),
            )
        else:
            self.absmax, self.nested = torch.rand(blocks, generator=g).add(0.1).to(device), {}

    def arguments(self, dtype):
        return (self.packed, self.absmax, self.shape, dtype)

    def member(self):
        code, scale, offset = self.nested.values() if self.nested else (None, None, None)
        return nf4.Weight(self.packed, self.absmax, code, scale, offset, self.shape[0])

    @property
    def options(self):
        return dict(blocksize=self.blocksize, quant_type=self.quant_type, **self.nested)

    def reference(self, dtype, cast):
        n, k = self.shape
        packed = self.packed.flatten().cpu().long()
        nibbles = torch.stack([packed // 16, packed % 16], 1).flatten()[: n * k]  # the even element is the high nibble
        value = torch.tensor(CODES[self.quant_type], dtype=torch.float32)[nibbles]
        scale = self.absmax.cpu()
        if self.nested:
            code, outer, offset = (t.cpu() for t in self.nested.values())
            scale = code[scale.long()] * outer.repeat_interleave(256)[: len(scale)] + offset
        scale = scale.repeat_interleave(self.blocksize)[: n * k]
        return cast(value * scale, dtype).view(n, k).to(self.packed.device)


REFERENCE = {"silu": F.silu, "gelu_tanh": lambda g: F.gelu(g, approximate="tanh")}


def reference(gate, up, activation, grad=None):
    g, u = gate.double().requires_grad_(), up.double().requires_grad_()
    y = REFERENCE[activation](g) * u
    return y.detach() if grad is None else torch.autograd.grad(y, (g, u), grad.double())


def make(shape, device, dtype, seed, spread=2.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread).to(device, dtype)
