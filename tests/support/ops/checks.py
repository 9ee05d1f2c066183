"""What every op must satisfy: gradients of its formula, a correct fake, providers as exact as the reference."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from tunecompile.ir.op import Op

QUICK = settings(max_examples=20, deadline=None, derandomize=True, database=None)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
LAYOUTS = st.sampled_from(["contiguous", "strided", "transposed", "expanded", "offset"])


def tensor(
    shape: tuple[int, ...], layout: str = "contiguous", dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    """Random values behind the given strides."""
    if layout == "strided":
        made = torch.randn(*shape[:-1], shape[-1] * 2)[..., ::2]
    elif layout == "transposed" and len(shape) > 1:
        made = torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    elif layout == "expanded" and len(shape) > 1:
        made = torch.randn(1, *shape[1:]).to(dtype).mul(scale).expand(shape)
        return made
    elif layout == "offset":
        made = torch.randn(shape[0] + 1, *shape[1:])[1:]
    else:
        made = torch.randn(shape)
    result = torch.empty_strided(made.shape, made.stride(), dtype=dtype)
    return result.copy_(made * scale)


def wide(args):
    """The same arguments in fp64."""
    return tree_map(
        lambda v: (
            v.double()
            if isinstance(v, Tensor) and v.is_floating_point()
            else torch.float64
            if v in (torch.float32, torch.bfloat16, torch.float16)
            else v
        ),
        list(args),
        is_leaf=lambda v: isinstance(v, torch.dtype),
    )


def outputs(result) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def error(got: Tensor, exact: Tensor) -> float:
    """Relative, in the norm."""
    assert got.shape == exact.shape
    return ((got.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30)).item()


def assert_fake_is_real(op: Op, *args) -> None:
    """Shape, dtype and strides of every output, and that no output shares memory with an input or another output."""
    with torch.no_grad():
        real = outputs(op(*args))
        with FakeTensorMode() as mode:
            fake = outputs(op(*tree_map(lambda v: mode.from_tensor(v) if isinstance(v, Tensor) else v, list(args))))
    assert len(real) == len(fake)
    for r, f in zip(real, fake):
        assert (r.shape, r.dtype, r.device) == (f.shape, f.dtype, f.device), op.name
        if r.numel() > 1:
            assert [s for s, n in zip(r.stride(), r.shape) if n > 1] == [
                s for s, n in zip(f.stride(), f.shape) if n > 1
            ], op.name
    storages = [t.untyped_storage()._cdata for t in [*real, *outputs(args)] if t.numel()]
    mine = [t.untyped_storage()._cdata for t in real if t.numel()]
    assert len(set(mine)) == len(mine) and not set(mine) & set(storages[len(mine) :]), f"{op.name} returns a view"


def assert_provider_is_exact(op: Op, name: str, *args, factor: float = 2.0) -> None:
    """Errors against fp64 of at most twice the reference's own, floored at the dtype's resolution."""
    run = next(p for p in op.providers if p.name == name).run
    exact, reference, got = (outputs(f(*a)) for f, a in ((op.reference, wide(args)), (op.reference, args), (run, args)))
    assert len(exact) == len(reference) == len(got)
    for e, r, g in zip(exact, reference, got):
        assert (r.shape, r.dtype) == (g.shape, g.dtype)
        if e.norm() > 0:
            floor = torch.finfo(r.dtype).eps / 2
            assert error(g, e) <= factor * max(error(r, e), floor), (op.name, name, error(g, e), error(r, e))
        else:
            assert g.abs().max() == 0 if g.numel() else True
