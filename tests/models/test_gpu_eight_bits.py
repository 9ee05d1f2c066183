"""8 bits on a real GPU: the kernels give what the emulation gives, and models train as in bf16."""

import copy

import pytest
import torch
from torch.utils import _pytree as pytree

import tunecompile
from tests.support import zoo
from tests.support.models.gpu import build, median
from tests.support.notes import EAGER, find
from tests.support.ops.arguments import eight_bits_case, provider_in
from tests.support.ops.checks import error
from tunecompile.ops import lora_linear

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["fp8", "int8"])
def precision(request):
    if request.param == "fp8" and torch.cuda.get_device_capability() not in ((9, 0), (10, 0)):
        pytest.skip("no FP8 products scaled by row on this GPU")
    return request.param


def moved(args, device):
    return pytree.tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, args)


def both(op, precision, args) -> tuple[list, list]:
    """A provider's results on the GPU and on the CPU, which emulates."""
    run = provider_in(op, precision).run
    return [t.cpu() for t in run(*moved(args, "cuda"))], list(run(*args))


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(bias=True),
        dict(own=True),
        dict(sizes=(512, 128, 128), ranks=(16, 16, 16), k=1024, rows=300),
        dict(adapters=torch.bfloat16, sizes=(1024,), ranks=(64,), k=2048, rows=2),
    ],
    ids=str,
)
def test_kernels_give_what_the_emulation_gives(options, precision):
    """But for the order of sums: the same operands, bf16 results."""
    args = eight_bits_case(**options)
    ours, theirs = both(lora_linear, precision, args)
    assert error(ours[0], theirs[0]) < 4e-3 and error(ours[1], theirs[1]) < 4e-3
    grad = torch.randn(theirs[0].shape).bfloat16()
    ours, theirs = both(lora_linear.backward_op, precision, [grad, *args, theirs[1]])
    assert max(error(o, t) for o, t in zip(ours, theirs)) < 6e-3


@pytest.mark.parametrize("double", [True, False])
def test_packed_weights(double, precision):
    from tests.support.ops.arguments import dense_and_packed

    _, packed = dense_and_packed(torch.bfloat16, double, (512, 128), (16, 16), bias=True)
    ours, theirs = both(lora_linear, precision, packed)
    # The scales differ by the bound's slack, so values round elsewhere: each is as far from the exact ones as the format puts it.
    exact = lora_linear(*packed)[0]
    assert error(ours[0], exact) < 1.2 * error(theirs[0], exact) + 4e-3
    grad = torch.randn(theirs[0].shape).bfloat16()
    args = [grad, *packed, theirs[1]]
    (ours, theirs), exact = both(lora_linear.backward_op, precision, args), lora_linear.backward_op(*args)
    assert error(ours[0], exact[0]) < 1.2 * error(theirs[0], exact[0]) + 4e-3
    assert max(error(o, t) for o, t in zip(ours[1:], theirs[1:])) < 6e-3


def optimized(model, precision=None):
    return tunecompile.optimize(copy.deepcopy(model), precision=precision)


@pytest.mark.parametrize("family, mode, autocast", [("llama", "qlora", torch.bfloat16), ("qwen3", "lora", None)])
def test_gradients_are_off_by_what_8_bits_round(family, mode, autocast, precision):
    """Each operand is off by 2.6 % (three bits of mantissa), each product by 3.7 %, and some fifteen of them lie between loss and first layer."""
    base = build(family, mode)
    reference, model = zoo.in_fp32(base), optimized(base, precision)
    for rows, length, seed in ((2, 256, 1), (3, 200, 2), (1, 77, 3)):  # symbolic sizes from the second on
        inputs = zoo.batch(4099, rows, length, "cuda", seed=seed)
        loss, exact = zoo.step(reference, inputs)
        got, ours = zoo.step(model, inputs, autocast)
        errors = zoo.errors(ours, exact)
        assert got.item() == pytest.approx(loss.item(), rel=5e-3)
        assert median(errors.values()) < 0.2 and max(errors.values()) < 0.35, max(
            errors.items(), key=lambda item: item[1]
        )
    report = tunecompile.report(model)
    chosen = report.regions[0].providers
    for way in (
        "",
        "_backward",
    ):  # q|k|v, o, gate|up and down; the last two are one op where adapters have the model's dtype
        assert (
            chosen[f"lora_linear{way}: {precision}"] + 2 * chosen.get(f"lora_mlp{way}: joined_{precision}", 0) == 4
        ), report
    assert not find(report, *EAGER, "not-in-precision", "products-not-in-precision", "region-not-in-precision"), report


def curve(model, steps: int = 24) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.0)
    losses = []
    for step in range(steps):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**zoo.batch(4099, 4, 128, "cuda", seed=step % 4)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", ["qlora", "lora"])
def test_losses_fall_along_those_of_bf16(mode, precision):
    base = build("llama", mode)
    ours, bf16 = curve(optimized(base, precision)), curve(optimized(base))
    fall = bf16[0] - bf16[-1]
    assert fall > 0.1 and sum(abs(f - b) for f, b in zip(ours, bf16)) / len(bf16) < 0.05 * fall


def test_recorded_layers_give_what_unrecorded_ones_give(precision):
    from tunecompile.runtime.model_state import state_of

    base = build("llama", "qlora")
    recorded = tunecompile.optimize(copy.deepcopy(base), precision=precision)
    plain = tunecompile.optimize(copy.deepcopy(base), precision=precision)
    state_of(plain).replays.recorder.device = "none"
    for seed in range(14):
        inputs = zoo.batch(4099, rows=2, length=32, device="cuda", seed=seed)
        (loss, ours), (expected, theirs) = (
            zoo.step(recorded, inputs, torch.bfloat16),
            zoo.step(plain, inputs, torch.bfloat16),
        )
        assert (
            loss.item() == pytest.approx(expected.item(), rel=1e-4) and max(zoo.errors(ours, theirs).values()) < 5e-3
        ), seed
    replays = state_of(recorded).replays
    assert replays.recorded or replays.stacks.chains.recorded


def test_memory_is_no_more_than_bf16s(precision):
    base, inputs, peaks = build("llama", "qlora"), zoo.batch(4099, 8, 512, "cuda"), {}
    for each in (None, precision):
        model = optimized(base, each)
        zoo.step(model, inputs, torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        zoo.step(model, inputs, torch.bfloat16)
        peaks[each] = torch.cuda.max_memory_allocated() - before
    assert peaks[precision] <= 1.05 * peaks[None]
