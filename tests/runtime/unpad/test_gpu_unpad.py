"""Padded batches without their padding, on a real GPU: by flash attention, no further from fp32 than eager, in less memory."""

import copy
import math

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import packed, padded
from tests.support.models.gpu import assert_no_further, build
from tests.support.notes import has
from tests.support.reports import as_documents, flattened, told_apart
from tunecompile.ops import varlen_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "dim, heads, shared, window",
    [
        (64, 9, 3, 0),
        (128, 8, 8, 0),
        (128, 8, 2, 40),
        (256, 4, 1, 0),
        (72, 4, 2, 17),
        (64, 4, 4, None),
        (80, 4, 4, None),
    ],
)
@pytest.mark.parametrize("lengths", [(1, 300, 0, 77), (513,), (200, 60, 0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_flash_attention_is_as_exact_as_the_reference(dim, heads, shared, window, lengths, sinks):
    """window: None where attention is not causal."""
    torch.manual_seed(0)
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v = (torch.randn(sum(lengths), h, dim, device="cuda", dtype=torch.bfloat16) for h in (heads, shared, shared))
    rest = (
        offsets,
        max(lengths) + 50,
        dim**-0.5,
        window or 0,
        torch.randn(heads, device="cuda").mul(2) if sinks else None,
        window is not None,
        0.0,
    )
    flash = next(p for p in varlen_attention.providers if p.name == "flash")
    back = next(p for p in varlen_attention.backward_op.providers if p.name == "flash")
    assert flash.supports(q, k, v, *rest)
    out, lse = flash.run(q, k, v, *rest)
    exact, exact_lse = varlen_attention.reference(*(x.double() for x in (q, k, v)), *rest)
    assert lse.dtype == torch.float32 and torch.allclose(lse.double(), exact_lse, atol=1e-3)
    assert (out - exact).norm() < 4e-3 * exact.norm()
    grad = torch.randn_like(out)
    got = back.run(grad, q, k, v, *rest, out, lse)
    wanted = varlen_attention.backward_op.reference(
        grad.double(), *(x.double() for x in (q, k, v)), *rest, exact, exact_lse
    )
    for mine, right in zip(got, wanted):
        assert mine.shape == right.shape and mine.is_contiguous() and (mine - right).norm() <= 1e-2 * right.norm()


MODELS = [("llama", "qlora", torch.bfloat16), ("qwen3", "lora", None), ("mistral", "full", torch.bfloat16)]
CASES = [(*model, "right") for model in MODELS] + [(*MODELS[0], "left")]
CASES += [pytest.param(*model, "left", marks=pytest.mark.slow) for model in MODELS[1:]]


def compare(model, plain, reference, inputs, autocast, limit=1.25) -> None:
    steps = zoo.step(model, inputs, autocast), zoo.step(plain, inputs, autocast), zoo.step(reference, inputs)
    assert_no_further(*steps, limit)


@pytest.mark.parametrize("family, mode, autocast, side", CASES)
def test_no_further_from_fp32_than_eager(family, mode, autocast, side):
    model = build(family, mode)
    reference, plain = zoo.in_fp32(model), copy.deepcopy(model)
    tunecompile.optimize(model)
    for seed, (rows, length) in enumerate([(4, 256), (5, 300), (3, 400)]):
        inputs = padded(rows, length, side, seed, "cuda", 4099)
        compare(model, plain, reference, inputs, autocast)
    assert (
        flattened(model) == 3
    )  # all of more than 512 tokens: fewer are one range of the MLP's sums, and compiled apart
    region = tunecompile.report(model).regions[0]
    assert region.providers["varlen_attention: flash"] and region.providers["varlen_attention_backward: flash"], region
    assert region.compiles <= 2, region


def test_packed_sequences_no_further_from_fp32_than_eager():
    """Eager has a dense mask; flash attention is told where each sequence begins."""
    model = build("llama", "lora")
    model.config.use_cache = False
    reference, plain = zoo.in_fp32(model), copy.deepcopy(model)
    tunecompile.optimize(model)
    for seed, rows in enumerate([[(300, 1, 500, 223)], [(700, 400), (90, 1010)], [(64,) * 20]]):
        inputs = {name: value.to("cuda") for name, value in packed(*rows, seed=seed, vocabulary=4099).items()}
        compare(model, plain, reference, inputs, torch.bfloat16, limit=math.inf)
    assert told_apart(model) == 3
    region = tunecompile.report(model).regions[0]
    assert region.providers["varlen_attention: flash"] and region.compiles <= 2, region


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_whole_rows_in_a_window_read_no_mask(family):
    """From the fourth step on masks are presumed. Full layers beside those with a window stay as they are."""
    model = build(family, "lora", sliding_window=100, use_cache=False)
    reference, plain = zoo.in_fp32(model), copy.deepcopy(model)
    tunecompile.optimize(model)
    for seed, length in enumerate([256] * 5 + [330, 192]):
        inputs = zoo.batch(4099, 4, length, "cuda", seed)
        compare(model, plain, reference, inputs, torch.bfloat16, limit=math.inf)
    assert as_documents(model) == 7
    region = tunecompile.report(model).regions[0]
    assert region.providers["varlen_attention: flash"], region


def test_full_precision_keeps_its_padding():
    model = zoo.make("llama", num_hidden_layers=2).to("cuda")
    reference = copy.deepcopy(model)
    tunecompile.optimize(model)
    for seed in range(2):
        (loss, _), (expected, _) = (zoo.step(m, padded(seed=seed, device="cuda")) for m in (model, reference))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert has(model, "padding-kept", reason="no-unpadded-kernel"), tunecompile.report(model)


def test_one_compilation_for_all_lengths():
    model = tunecompile.optimize(build("llama", "lora"))
    generator = torch.Generator().manual_seed(0)
    for seed in range(30):
        rows, length = (
            torch.randint(1, 9, (1,), generator=generator).item(),
            torch.randint(40, 700, (1,), generator=generator).item(),
        )
        zoo.step(model, padded(rows, length, seed=seed, device="cuda", vocabulary=4099))
    assert flattened(model) == 30 and tunecompile.report(model).compiles <= 3, tunecompile.report(model)


def test_less_memory_than_with_padding():
    model = tunecompile.optimize(build("llama", "lora"))
    inputs = padded(16, 1024, device="cuda", vocabulary=4099)
    kept = {**inputs, "labels": inputs["labels"].clone()}
    kept["labels"][-1, -1] = 7  # a reason to keep the padding
    peaks = []
    for batch in (inputs, kept):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            zoo.step(model, batch)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] < 0.8 * peaks[1], peaks


def test_replayed_as_it_is_computed():
    """Launch-bound layers are recorded for a shape that comes back; what the recording reads changes with every batch."""
    from tunecompile.runtime.model_state import state_of

    base = zoo.adapt(
        zoo.make("llama", hidden_size=256, num_hidden_layers=4, vocab_size=4099).to("cuda", torch.bfloat16)
    )
    model, plain = tunecompile.optimize(copy.deepcopy(base)), tunecompile.optimize(copy.deepcopy(base))
    state_of(plain).replays.recorder.device = "none"
    for seed in range(16):
        inputs = padded(3, 64, seed=0, device="cuda", vocabulary=4099)  # the same sizes
        inputs = {name: value.roll(seed % 3, 0) for name, value in inputs.items()}  # in another order
        inputs["input_ids"] = (inputs["input_ids"] + seed) % 4099
        (loss, ours), (expected, theirs) = zoo.step(model, inputs), zoo.step(plain, inputs)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
        assert max(zoo.errors(ours, theirs).values()) < 2e-2, seed
    replays = state_of(model).replays
    assert flattened(model) == 16 and (replays.recorded or replays.stacks.chains.recorded), tunecompile.report(model)
