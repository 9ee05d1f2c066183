"""An estimate says what a training step then does, and leaves no trace."""

import gc
import weakref

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.matrix.families import EMBEDDED
from tests.support.models.pairs import of_plain_layers
from tunecompile.errors import BadBatchShape, CannotEstimate, UnknownBudget, UnknownGpu
from tunecompile.estimate import dry_run
from tunecompile.planner.device_memory import MARGIN
from tunecompile.runtime.memory.accounting import MemoryAccounting
from tunecompile.runtime.unpad.masks.pairs import MaskCell

tf = pytest.importorskip("transformers")
pytest.importorskip("peft")
SHAPE, LAYERS = (2, 16), 4


def make(quantised: bool = False, **config) -> nn.Module:
    model = zoo.make("llama", num_hidden_layers=LAYERS, **config)
    return zoo.adapt(zoo.quantize(model) if quantised else model).train()


def step(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(3)
    loss = model(**zoo.batch()).loss
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return loss.detach(), gradients


def resident(estimate: tunecompile.Estimate) -> int:
    return estimate.weights + estimate.gradients + estimate.optimizer


@pytest.mark.parametrize("quantised, share", [(False, 0.7), (False, 1.2), (True, 0.7), (True, 1.2)])
@pytest.mark.slow
def test_the_plan_is_that_of_a_step_under_the_same_budget(quantised, share, monkeypatch):
    """On a CPU a step's budget bounds what layers, head and loss hold, and here gradients as on a GPU. An estimate counts the rest as well."""
    monkeypatch.setattr(
        MemoryAccounting,
        "_ungraded",
        lambda _, module: [p for p in module.parameters() if p.requires_grad and p.grad is None],
    )
    monkeypatch.setattr(
        MemoryAccounting, "_to_come", lambda self, first: self.shards.to_come(self._ungraded(self.model), [])
    )
    if quantised:
        pytest.importorskip("bitsandbytes")
    whole = tunecompile.estimate(make(quantised), SHAPE)
    allowed = int(share * whole.activations)
    model = tunecompile.optimize(
        make(quantised), memory=allowed + int(whole.gradients / (1 - MARGIN)), executor="eager"
    )
    step(model)
    real = tunecompile.report(model).memory
    estimate = tunecompile.estimate(make(quantised), SHAPE, memory=allowed + int(resident(whole) / (1 - MARGIN)))
    assert estimate.plans == real["plans"] and estimate.gradients + estimate.activations == real["predicted_peak"]
    assert estimate.peak == resident(estimate) + estimate.activations and estimate.fits


@pytest.mark.slow
def test_nothing_is_left_behind():
    reference, model = make(), make()
    names = [(name, type(module), set(vars(module))) for name, module in model.named_modules()]
    values, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    tunecompile.estimate(model, SHAPE, memory="1GiB")
    assert torch.equal(torch.get_rng_state(), random)
    assert [(name, type(module), set(vars(module))) for name, module in model.named_modules()] == names
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    results = [step(tunecompile.optimize(m, executor="eager")) for m in (reference, model)]
    assert torch.equal(results[0][0], results[1][0]) and all(map(torch.equal, results[0][1], results[1][1]))
    reports = [tunecompile.report(m).to_dict() for m in (reference, model)]
    for region in (region for report in reports for region in report["regions"]):
        assert region.pop("seconds") > 0
    assert reports[0] == reports[1]


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["1GiB", None])
def test_the_model_can_be_freed(memory):
    model = make()
    weight = weakref.ref(next(model.parameters()))
    tunecompile.estimate(model, SHAPE, memory=memory)
    del model
    gc.collect()
    assert weight() is None


@pytest.mark.slow
def test_what_does_not_fit_is_told_with_a_batch_that_does():
    model = make()
    allowed = int(0.6 * tunecompile.estimate(model, (2, 64)).peak) + resident(tunecompile.estimate(model, SHAPE)) // 2
    short = tunecompile.estimate(model, (8, 64), memory=allowed)
    assert short.fits is False and short.missing > 0 and 0 < short.fitting_tokens < 8 * 64
    assert f"{short.fitting_tokens} tokens would fit" in str(short)
    assert tunecompile.estimate(model, (short.fitting_tokens // 64, 64), memory=allowed).fits


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Plain(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layers = nn.ModuleList(Block() for _ in range(layers)) if layers else Block()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids):
        if isinstance(self.layers, nn.ModuleList):  # else Dynamo traces it
            self.calls += 1
            torch.rand(3)
        x = self.embedding(ids)
        for layer in self.layers if isinstance(self.layers, nn.ModuleList) else [self.layers]:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("layers", [3, 0])
def test_a_plain_model(layers):
    model = Plain(layers)
    random = torch.get_rng_state()
    estimate = tunecompile.estimate(model, (4, 32), memory="1GiB")
    assert model.calls == 0 and torch.equal(torch.get_rng_state(), random)
    assert (
        estimate.fits and estimate.activations > 0 and sum(plan["layers"] for plan in estimate.plans) == (layers or 1)
    )
    assert estimate.optimizer == 2 * estimate.gradients
    assert tunecompile.estimate(Plain(layers), (4, 32), memory="1GiB", optimizer_bytes=0).optimizer == 0


def test_wrong_questions_are_refused():
    model = make()
    for shape in ((2,), (2, 0), (2.0, 3), 5, "2x3", (True, 4)):
        with pytest.raises(BadBatchShape, match="rows, length"):
            tunecompile.estimate(model, shape)
    with pytest.raises(UnknownBudget):
        tunecompile.estimate(model, SHAPE, memory="plenty")
    for spec in ("auto", 0.8):
        with pytest.raises(CannotEstimate, match="relative to a GPU"):
            tunecompile.estimate(model, SHAPE, memory=spec)
    with pytest.raises(CannotEstimate, match="nothing in it is trained"):
        tunecompile.estimate(model.requires_grad_(False), SHAPE)
    with pytest.raises(CannotEstimate, match="too long"):
        tunecompile.estimate(Refusing(3), SHAPE)


def test_other_weights_that_are_not_quantised_yet_are_not_guessed():
    bnb = pytest.importorskip("bitsandbytes")
    with torch.device("meta"):
        model = Plain(3)
    model.layers[0].up = bnb.nn.Linear8bitLt(16, 32, has_fp16_weights=False, device="meta")
    with pytest.raises(CannotEstimate, match="Int8Params on the meta device is not quantised"):
        tunecompile.estimate(model, SHAPE)


@pytest.mark.slow
def test_a_gpu_that_is_not_there():
    model = make()
    told, smaller = (tunecompile.estimate(model, SHAPE, gpu=gpu) for gpu in ("h200", "h200,memory=1GiB"))
    assert told.fits and told.milliseconds > 0 and told.budget > 130 * 2**30 > smaller.budget and not told.notes
    assert told.to_dict() | {"budget": 0, "margin": 0} == smaller.to_dict() | {"budget": 0, "margin": 0}
    assert (
        tunecompile.estimate(model, SHAPE, memory="auto", gpu="l4").fits
        and tunecompile.estimate(model, SHAPE, memory=0.5, gpu="l4").fits
    )
    assert tunecompile.estimate(model, SHAPE, gpu="l4").milliseconds > told.milliseconds
    assert tunecompile.estimate(model, SHAPE).milliseconds is None  # and nothing is taken for a GPU's any more
    with pytest.raises(UnknownGpu, match="Known are b200, h200"):
        tunecompile.estimate(model, SHAPE, gpu="x900")


class Refusing(Plain):
    def forward(self, ids):
        raise ValueError("this batch is too long")


def test_machines_read_it_too():
    estimate = tunecompile.estimate(make(), SHAPE, memory="1GiB")
    told = estimate.to_dict()
    assert told["peak"] == estimate.peak and told["plans"] == estimate.plans and told["batch_shape"] == SHAPE
    assert "it fits" in str(estimate) and "4 layers keep" in str(estimate)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [None, 0.7])
def test_the_peak_is_the_measured_one(share):
    """From the second step on, when the optimizer's moments are there."""

    def build():
        model = zoo.make(
            "llama",
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=32000,
            max_position_embeddings=2048,
        )
        return zoo.adapt(model.to("cuda", torch.bfloat16), r=16).train()

    shape, model = (8, 2048), build()
    with torch.autocast("cuda", torch.bfloat16):
        memory = None if share is None else int(share * tunecompile.estimate(model, shape).peak)
        estimate = tunecompile.estimate(model, shape, memory=memory)
    gc.collect()
    before = torch.cuda.memory_allocated() - sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
    tunecompile.optimize(model, memory=memory)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    inputs = zoo.batch(32000, *shape, device="cuda")
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    told = tunecompile.report(model)
    peak = torch.cuda.max_memory_allocated() - before
    assert estimate.fits and estimate.milliseconds > 0
    if memory is None:
        assert peak == pytest.approx(estimate.peak, rel=0.1), f"{estimate}\n{told}"
        return
    # Both price what they find on this machine at this moment, and other processes use it too: near the edge of two plans they may take different ones.
    assert torch.cuda.max_memory_allocated() == pytest.approx(told.memory["predicted_peak"], rel=0.1), (
        f"{estimate}\n{told}"
    )
    assert peak < 1.05 * estimate.peak < 1.05 * memory, f"{estimate}\n{told}"
    assert told.memory["measured_ms"] > 0
    if told.memory["plans"] == estimate.plans:
        assert peak == pytest.approx(estimate.peak, rel=0.1) and told.memory["predicted_ms"] == pytest.approx(
            estimate.milliseconds, rel=0.1
        )


@pytest.mark.slow
def test_written_out_attention_keeps_no_scores_and_makes_no_mask():
    """As a training step, which runs it on documents: a mask of 65,536 tokens would be 8 GiB, scores more."""
    model = zoo.make("llama", num_hidden_layers=2, attn_implementation="eager", max_position_embeddings=1 << 16)
    found = tunecompile.estimate(model.train(), (1, 1 << 16))
    assert found.activations < 2 << 30, found


@pytest.mark.slow
def test_windows_of_long_rows_make_no_mask(monkeypatch):
    """Neither does the estimate: it would be 4 GiB. Where layers read masks, they count."""
    more = {"num_hidden_layers": 2, "sliding_window": 64, "max_position_embeddings": 1 << 16}
    model = zoo.make("mistral", **more).train()
    monkeypatch.setattr(MaskCell, "real", lambda cell: pytest.fail("a mask was made"))
    assert tunecompile.estimate(model, (1, 1 << 16)).activations < 2 << 30
    model.config.output_hidden_states = True
    counted = tunecompile.estimate(model, (2, 512)).activations
    monkeypatch.setattr(dry_run, "mask_in", lambda *_: None)
    assert counted - tunecompile.estimate(model, (2, 512)).activations == 2 * 512 * 512


@pytest.mark.slow
def test_layers_that_share_keys_are_estimated():
    """The one that writes them is skipped, since another of its kind was surveyed, and hands them on all the same."""
    if not hasattr(tf, "Gemma4TextConfig"):
        pytest.skip("a later transformers has it")
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6}
    model = zoo.make("gemma4", **{**EMBEDDED, **kinds, "num_kv_shared_layers": 1, "use_cache": False})
    estimate = tunecompile.estimate(zoo.adapt(model).train(), SHAPE)
    assert estimate.activations > 0 and sum(plan["layers"] for plan in estimate.plans) == 6, estimate


@pytest.mark.parametrize("tied", [True, False])
def test_the_end_of_a_step_that_trains_a_tied_head(tied):
    """Short rows hold less than the gradients of head and embedding and their sum take, which are there at once."""
    model = of_plain_layers(vocab_size=32768, tie_word_embeddings=tied).train()
    told, shared = tunecompile.estimate(model, (1, 2)), 2 * model.get_input_embeddings().weight.nbytes
    assert (told.peak == resident(told) + shared) is tied
    frozen = of_plain_layers(vocab_size=32768, tie_word_embeddings=tied)
    frozen.get_input_embeddings().requires_grad_(False)
    frozen.get_output_embeddings().requires_grad_(False)
    told = tunecompile.estimate(frozen.train(), (1, 2))
    assert told.peak < resident(told) + shared
