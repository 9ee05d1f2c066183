"""The gated delta rule by template, forward and backward, against the rule a token at a time in fp64."""

import pytest
import torch

pytest.importorskip("triton")
from tests.support.ops.recurrent import operands, recurrence  # noqa: E402
from tunecompile.ops.recurrent.documents import document_of  # noqa: E402
from tunecompile.templates.recurrent import delta_rule  # noqa: E402

ON_GPU = torch.cuda.is_available()
#: Triton's interpreter multiplies no bf16
HALF = torch.bfloat16 if ON_GPU else torch.float16
CASES = {  # rows, tokens, heads of q and k, heads, keys, values; offsets
    "shared heads": ((2, 70, 1, 2, 16, 16), None),
    "documents": ((1, 150, 2, 2, 16, 16), [0, 3, 64, 100, 101, 128, 150]),
    "blanks behind documents": ((1, 140, 1, 2, 32, 48), [0, 10, 129]),
    "one token": ((1, 1, 1, 1, 16, 16), None),
    "heads of a real model": ((1, 130, 1, 1, 128, 128), None),
}
QUICK = ("documents", "heads of a real model")


def drawn(case, dtype, device):
    """(Operands, offsets, numbers of documents, gradients of both results)."""
    sizes, ends = CASES[case]
    torch.manual_seed(0)
    made = [x.detach() for x in operands(*sizes)[:5]]
    made[:2] = [x / x.norm(dim=-1, keepdim=True) for x in made[:2]]
    grads = torch.randn_like(made[2]), torch.randn(sizes[0], sizes[3], sizes[4], sizes[5])
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=device)
    numbers = None if ends is None else document_of(offsets, sizes[1]).to(torch.int32)
    grads = grads[0].to(dtype), grads[1].float()
    return [x.to(device, dtype) for x in made], offsets, numbers, [x.to(device) for x in grads]


def exact(args, offsets, grads, delta=True):
    leaves = [x.double().requires_grad_() for x in args]
    made = recurrence(*leaves, None, offsets, 0.3, 0.0, delta)
    return made, torch.autograd.grad(sum((x * g.double()).sum() for x, g in zip(made, grads)), leaves)


def by_template(args, offsets, numbers, grads, delta=True):
    made = delta_rule.forward(*args, offsets, numbers, scale=0.3, delta=delta)
    found = delta_rule.backward(*grads, *args, offsets, numbers, scale=0.3, delta=delta)
    shared = args[0].shape[2]
    found[:2] = [x.unflatten(2, (shared, -1)).double().sum(3) for x in found[:2]]
    return made, found


@pytest.mark.parametrize(
    ("case", "delta"),
    [
        *(pytest.param(case, True, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES),
        ("documents", False),
        pytest.param("heads of a real model", False, marks=pytest.mark.slow),
    ],
)
def test_against_the_recurrence(case, delta, device, error):
    dtype = HALF if ON_GPU or case == "heads of a real model" else torch.float32
    args, offsets, numbers, grads = drawn(case, dtype, device)
    made, found = by_template(args, offsets, numbers, grads, delta)
    right, gradients = exact(args, offsets, grads, delta)
    errors = [error(x, y) for x, y in zip((*made, *found), (*right, *gradients)) if y.norm() > 1e-9]
    assert max(errors) < (5e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps), errors


def test_tokens_that_repeat(device, error):
    """I + A is a triangle of ones: powers of A would reach 10^17."""
    args, _, _, grads = drawn("heads of a real model", HALF if ON_GPU else torch.float32, device)
    args[1] = args[1][:, :1].expand_as(args[1]).contiguous()
    args[3], args[4] = torch.zeros_like(args[3]), torch.ones_like(args[4])
    made, right = delta_rule.forward(*args, scale=0.3)[0], exact(args, None, grads)[0][0]
    assert error(made, right) < (2e-2 if ON_GPU else 1e-5)


@pytest.mark.slow
def test_operands_stand_in_one_buffer(device):
    """As behind the convolution: q, k and v are columns of it."""
    args, *_, grads = drawn("shared heads", torch.float32, device)
    q, k, v = args[:3]
    buffer = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    views = [x.unflatten(-1, y.shape[2:]) for x, y in zip(buffer.split([16, 16, 32], -1), (q, k, v))]
    for a, b in zip(by_template(args, None, None, grads), by_template([*views, *args[3:]], None, None, grads)):
        assert all(torch.equal(x, y) for x, y in zip(a, b))


def test_sizes_that_no_kernel_takes(device):
    args, *_ = drawn("one token", torch.float32, device)
    with pytest.raises(ValueError, match="keys of 12"):
        delta_rule.forward(args[0][..., :12], args[1][..., :12], *args[2:], scale=1.0)
    with pytest.raises(ValueError, match="documents"):
        delta_rule.forward(*args, torch.tensor([0, 1], device=device), None, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
def test_real_size(gpu_only, device, error, documents):
    from tunecompile.ops import gated_delta_rule

    torch.manual_seed(0)
    q, k, v, g, beta, _ = operands(1, 4096, 16, 32, 128, 128, dtype=torch.float32)
    args = [x.detach().to(device, torch.bfloat16).requires_grad_() for x in (q, k, v)]
    args += [x.detach().to(device).requires_grad_() for x in (g, beta)]
    offsets = torch.tensor([0, 1, 1000, 1024, 3000], dtype=torch.int32, device=device) if documents else None
    rest = (None, offsets, 128**-0.5, 1e-6)
    wide = [x.detach().double().requires_grad_() for x in args]
    right = gated_delta_rule(*wide, *rest)
    grads = [torch.randn_like(x) for x in right]
    gradients = torch.autograd.grad(right, wide, grads)
    ops = gated_delta_rule, gated_delta_rule.backward_op
    forward, backward = (next(p for p in op.providers if p.name == "triton").run for op in ops)
    with torch.no_grad():
        made = forward(*args, *rest)
        given = [grads[0].bfloat16(), grads[1].float()]
        found = backward(*given, *args, *rest, used=(True,) * 5 + (False,))
    errors = [error(x, y) for x, y in zip((*made, *found[:5]), (*right, *gradients))]
    assert max(errors) < 2e-2, errors
