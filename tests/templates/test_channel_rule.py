"""The delta rule with decays of channels by template, forward and backward, against the rule a token at a time in fp64."""

import pytest
import torch

pytest.importorskip("triton")
from tests.support.ops.recurrent import operands, recurrence  # noqa: E402
from tunecompile.ops.recurrent.documents import document_of  # noqa: E402
from tunecompile.templates.recurrent import channel_rule  # noqa: E402

ON_GPU = torch.cuda.is_available()
#: Triton's interpreter multiplies no bf16
HALF = torch.bfloat16 if ON_GPU else torch.float16
CASES = {  # rows, tokens, heads, keys, values; offsets
    "documents": ((1, 100, 1, 32, 16), [0, 3, 64, 80, 81, 95]),
    "rows": ((2, 70, 2, 16, 16), None),
    "one token": ((1, 1, 1, 16, 16), None),
    "heads of a real model": ((1, 130, 1, 128, 128), None),
}
QUICK = ("documents",)


def drawn(case, dtype, device):
    """(Operands, offsets, numbers of documents, gradients of both results)."""
    (rows, tokens, heads, keys, values), ends = CASES[case]
    torch.manual_seed(0)
    made = [x.detach() for x in operands(rows, tokens, heads, heads, keys, values, channels=True)[:5]]
    made[:2] = [x / x.norm(dim=-1, keepdim=True) for x in made[:2]]
    grads = torch.randn_like(made[2]), torch.randn(rows, heads, keys, values)
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=device)
    numbers = None if ends is None else document_of(offsets, tokens).to(torch.int32)
    grads = grads[0].to(dtype), grads[1].float()
    made = [x.to(device, torch.float32 if i == 3 else dtype) for i, x in enumerate(made)]
    return made, offsets, numbers, [x.to(device) for x in grads]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_against_the_recurrence(case, device, error):
    dtype = HALF if ON_GPU or case == "heads of a real model" else torch.float32
    args, offsets, numbers, grads = drawn(case, dtype, device)
    made = channel_rule.forward(*args, numbers, scale=0.3)
    found = channel_rule.backward(*grads, *args, numbers, scale=0.3)
    leaves = [x.double().requires_grad_() for x in args]
    right = recurrence(*leaves, None, offsets, 0.3, 0.0)
    gradients = torch.autograd.grad(sum((x * g.double()).sum() for x, g in zip(right, grads)), leaves)
    errors = [error(x, y) for x, y in zip((*made, *found), (*right, *gradients)) if y.norm() > 1e-9]
    assert max(errors) < (1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps), errors


def test_pairs_within_a_chunk_cancel_in_the_gradients_of_decays(device):
    """Summed over tokens they are those of rates: what both tokens of a pair add must be one number."""
    torch.manual_seed(0)
    made = operands(1, 128, 2, 2, 32, 16, channels=True)[:5]
    made[3] = -torch.tensor([2.0, 8.0])[:, None] * torch.nn.functional.softplus(0.5 * torch.randn(1, 128, 2, 32) - 2)
    made[:2] = [x / x.norm(dim=-1, keepdim=True) for x in made[:2]]
    args = [x.detach().to(device, torch.float32 if i == 3 else HALF) for i, x in enumerate(made)]
    leaves = [x.double().requires_grad_() for x in args]
    right = recurrence(*leaves, None, None, 0.2, 0.0)[0]
    grad = torch.randn_like(right).to(HALF)
    (true,) = torch.autograd.grad(right, leaves[3], grad.double())
    found = channel_rule.backward(grad, grad.new_zeros(1, 2, 32, 16).float(), *args, scale=0.2)[3]
    rates, exact = ((x.double() * leaves[3].detach()).sum((0, 1)) for x in (found, true))
    assert (rates - exact).norm() < 0.7 * torch.finfo(HALF).eps * exact.norm()  # 0.4; 1.6 where it is not


@pytest.mark.slow
def test_everything_is_forgotten(device):
    """Decays of nearly everything overflow nowhere."""
    args, _, _, grads = drawn("rows", torch.float32, device)
    args[3] *= 1e4
    made = (*channel_rule.forward(*args, scale=0.3), *channel_rule.backward(*grads, *args, scale=0.3))
    assert all(x.isfinite().all() for x in made)


def test_sizes_that_no_kernel_takes(device):
    args, *_ = drawn("one token", torch.float32, device)
    with pytest.raises(ValueError, match="keys of 12"):
        channel_rule.forward(args[0][..., :12], args[1][..., :12], *args[2:], scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
def test_real_size(gpu_only, device, error, documents):
    from tunecompile.ops import channel_delta_rule as op

    torch.manual_seed(0)
    drawn = operands(1, 2048, 8, 8, 128, 128, dtype=torch.float32, channels=True)[:5]
    args = [x.detach().to(device, torch.bfloat16 if i < 3 else torch.float32) for i, x in enumerate(drawn)]
    args[3] *= 0.1
    offsets = torch.tensor([0, 1, 1000, 1024, 1500], dtype=torch.int32, device=device) if documents else None
    rest = (None, offsets, 128**-0.5, 1e-6)
    wide = [x.double().requires_grad_() for x in args]
    right = op(*wide, *rest)
    grads = [torch.randn_like(x) for x in right]
    gradients = torch.autograd.grad(right, wide, grads)
    with torch.no_grad():
        made = op.providers[0].run(*args, *rest)
        given = [grads[0].bfloat16(), grads[1].float()]
        found = op.backward_op.providers[0].run(*given, *args, *rest, used=(True,) * 5 + (False,))
    errors = [error(x, y) for x, y in zip((*made, *found[:5]), (*right, *gradients))]
    print(errors)
    assert max(errors) < 2e-2, errors
