"""RMS norm as Llama spells it, its statistics alone, and LayerNorm in the dtype of x."""

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


def centred_norm(x, w, twice, rounded):
    """LayerNorm without a bias, whose mean is in x's dtype. `twice`: x is centred anew for its variance."""
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    made = w * (centred * torch.rsqrt(((x - mean) if twice else centred).pow(2).mean(-1, keepdim=True) + EPS))
    return made.to(torch.bfloat16) if rounded else made
