"""Mamba-1's scan by template, forward and backward, against the recurrence a token at a time in fp64."""

import pytest
import torch

pytest.importorskip("triton")
from tests.support.ops.recurrent import selective_operands, selective_recurrence  # noqa: E402
from tunecompile.ops.recurrent.documents import document_of  # noqa: E402
from tunecompile.templates.recurrent import selective_scan  # noqa: E402

CASES = {  # rows, tokens, channels, states; offsets
    "documents": ((1, 40, 5, 2), [0, 3, 32, 33, 38]),
    "rows, three states": ((2, 40, 9, 3), None),
    "one token": ((1, 1, 3, 4), None),
    "more channels than a program's": ((1, 33, 18, 1), None),
}


def drawn(case, dtype, device):
    """(Operands, numbers of documents, offsets, gradients of both results)."""
    sizes, ends = CASES[case]
    torch.manual_seed(0)
    args = [x.detach() for x in selective_operands(*sizes)[:5]]
    grads = torch.randn_like(args[0]), torch.randn(sizes[0], *args[2].shape, dtype=torch.float64)
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=device)
    numbers = None if ends is None else document_of(offsets, sizes[1]).to(torch.int32)
    args = [x.to(device, torch.float32 if i in (1, 2) else dtype) for i, x in enumerate(args)]
    return args, numbers, offsets, [grads[0].to(device, dtype), grads[1].to(device, torch.float32)]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "documents" else pytest.mark.slow) for case in CASES]
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_against_the_recurrence(case, dtype, device, error, monkeypatch):
    monkeypatch.setattr(selective_scan, "CHANNELS", 16)
    args, numbers, offsets, grads = drawn(case, dtype, device)
    made = selective_scan.forward(*args, numbers)
    found = selective_scan.backward(*grads, *args, numbers)
    leaves = [x.double().requires_grad_() for x in args]
    right = selective_recurrence(*leaves, None, offsets)
    gradients = torch.autograd.grad(sum((x * g.double()).sum() for x, g in zip(right, grads)), leaves)
    errors = [error(x, y) for x, y in zip((*made, *found), (*right, *gradients))]
    assert max(errors) < (5e-6 if dtype == torch.float32 else torch.finfo(dtype).eps), errors


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
def test_real_size(gpu_only, device, error, documents):
    from tunecompile.ops import selective_scan as op

    torch.manual_seed(0)
    x, dt, a, b, c, _ = (
        None if t is None else t.detach() for t in selective_operands(1, 2048, 2048, 16, dtype=torch.float32)
    )
    args = [
        t.to(device, torch.bfloat16 if t is x or t is b or t is c else torch.float32) for t in (x, dt * 0.1, a, b, c)
    ]
    offsets = torch.tensor([0, 1, 1000, 1024, 1500], dtype=torch.int32, device=device) if documents else None
    wide = [t.double().requires_grad_() for t in args]
    right = op(*wide, None, offsets)
    grads = [torch.randn_like(t) for t in right]
    gradients = torch.autograd.grad(right, wide, grads)
    with torch.no_grad():
        made = op.providers[0].run(*args, None, offsets)
        given = [grads[0].bfloat16(), grads[1].float()]
        found = op.backward_op.providers[0].run(*given, *args, None, offsets, used=(True,) * 5 + (False,))
    errors = [error(t, y) for t, y in zip((*made, *found[:5]), (*right, *gradients))]
    assert max(errors) < 1e-2, errors
