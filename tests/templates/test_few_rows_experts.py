"""Products of few rows with the matrices of their experts, packed and dense, against fp64."""

import pytest
import torch

from tests.support.ops.templates import Weight

pytest.importorskip("triton")
from tunecompile.ops.packed.mxfp4 import dequantize_mxfp4  # noqa: E402
from tunecompile.templates import nf4  # noqa: E402
from tunecompile.templates.few_rows import experts, launches  # noqa: E402

EXPERTS, N, RANK = 5, 128, 4
ENDS = (3, 3, 24, 25, 28)  #: of each expert's rows: none, more than one tile; then two of no expert
ROWS = ENDS[-1] + 2


def stack(quant_type, k, device, cast):
    """(The weight, its options, what it means: fp64 [E, N, K])."""
    g, rows = torch.Generator().manual_seed(0), EXPERTS * N
    if quant_type in ("nf4", "fp4"):
        w = Weight(rows, k, device, quant_type=quant_type)
        made, right = w.member(), w.reference(torch.float32, cast)
    elif quant_type == "mxfp4":
        codes, exponents = (
            torch.randint(*limits, (rows * k // by,), generator=g, dtype=torch.uint8).to(device)
            for limits, by in (((0, 256), 2), ((120, 130), 32))
        )
        made = nf4.Weight(codes, exponents, None, None, None, rows)
        right = dequantize_mxfp4.reference(codes, exponents, rows, k, torch.float32)
    else:
        right = torch.randn(rows, k, generator=g).to(device, dtype_on(device)).float()
        whole = right.view(EXPERTS, N, k).to(dtype_on(device))
        held = whole if quant_type == "dense" else whole.transpose(1, 2).contiguous()
        made = nf4.Weight(held, None, None, None, None, rows)
    form = {"quant_type": "dense" if quant_type == "turned" else quant_type, "turned": quant_type != "turned"}
    return made, form, right.view(EXPERTS, N, k).double()


def dtype_on(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float32  # the interpreter multiplies bf16 by their bits


@pytest.mark.parametrize("quant_type", ["nf4", "fp4", "mxfp4", "dense", "turned"])
@pytest.mark.parametrize(("k", "adapted"), [(192, False), (256, True)])
def test_rows_of_their_experts(device, cast, quant_type, k, adapted):
    weight, form, matrices = stack(quant_type, k, device, cast)
    g, offsets = torch.Generator().manual_seed(1), torch.tensor(ENDS, device=device)
    x, bias = (torch.randn(*shape, generator=g).to(device, dtype_on(device)) for shape in ((ROWS, k), (EXPERTS, N)))
    a = torch.randn(EXPERTS * RANK, k, generator=g).mul(k**-0.5).to(device)
    b = torch.randn(N, RANK * EXPERTS, generator=g).to(device)
    ordered = x if form["quant_type"] == "dense" else launches.in_order(x).contiguous()
    more = {"xa": experts.downs(x, a, offsets), "b": b, "factor": 0.5} if adapted else {"bias": bias}
    found = experts.rows(ordered, weight, offsets, **form, **more)
    right, begin = torch.zeros(ROWS, N, dtype=torch.float64, device=device), 0
    for expert, end in enumerate(ENDS):
        mine, delta = x[begin:end].double(), bias[expert].double()
        if adapted:
            down, up = a.view(EXPERTS, RANK, k)[expert], b.view(N, RANK, EXPERTS)[..., expert]
            delta = 0.5 * (mine @ down.double().t()) @ up.double().t()
        right[begin:end], begin = mine @ matrices[expert].t() + delta, end
    assert found.dtype == x.dtype and (found[ENDS[-1] :] == 0).all()
    apart = (found.double() - right).norm(dim=1) / right.norm(dim=1).mean()
    assert apart.max() < 1e-2, apart


def test_what_does_not_fit(device):
    weight, offsets = nf4.Weight(torch.zeros(4, 64, 96), None, None, None, None, 256), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="96 columns"):
        experts.rows(torch.zeros(2, 96), weight, offsets, quant_type="dense")
    with pytest.raises(ValueError, match="rank 80"):
        experts.downs(torch.zeros(2, 128), torch.zeros(320, 128), offsets)
