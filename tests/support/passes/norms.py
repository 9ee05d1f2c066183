"""RMS norm as Llama spells it, and its statistics alone."""

import torch

EPS = 1e-3


def llama_norm(x, w):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    return w * x.to(dtype)


def stat(x, w, e=EPS):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + e)
