"""`tunecompile.verify`: right gradients pass, planted faults are caught and named, and the model is left as it was."""

import copy
import importlib
import json
import types
from dataclasses import replace

import pytest
import torch
from torch import nn

import tunecompile
import tunecompile.passes
from tests.support import zoo
from tests.support.matrix import cells as support
from tests.support.models import packed
from tests.support.models.verified import build, verified
from tests.support.notes import find, has
from tests.support.planted_passes import planted_passes
from tunecompile.compiler.pass_manager import Pass
from tunecompile.errors import CannotVerify
from tunecompile.verification.reference_model import mode, twin_of
from tunecompile.verification.tolerance import compare_gradients

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
aten = torch.ops.aten
verification = importlib.import_module("tunecompile.verification.verify")  # the package has the function by that name


def test_right_gradients_pass():
    result = verified(build("llama", "lora"))
    assert result.passed, str(result)
    assert result.reference == "float64" and all(row["error"] < 1e-5 for row in result.gradients)
    assert (
        len(result.gradients) == sum(p.requires_grad for p in build("llama", "lora").parameters())
        and not result.untrained
    )
    assert json.loads(json.dumps(result.to_dict()))[
        "passed"
    ] and "passed: every trainable parameter got a gradient" in str(result)


def test_adapters_over_experts_are_wide_when_computed_again():
    """PEFT puts a parametrisation on experts while they run and takes it off again: what it puts back has to be widened the next time too."""
    model = zoo.adapt(zoo.make("qwen3_moe").to(torch.bfloat16)).train()
    twin = twin_of(model, torch.float32)
    for _ in range(2):
        _, gradients = zoo.step(twin, zoo.batch())
    assert len(gradients) == sum(p.requires_grad for p in twin.parameters())
    assert all(gradient.dtype is torch.float32 and gradient.norm() > 0 for gradient in gradients.values())
    assert {p.dtype for p in twin.base_model.model.model.layers.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_4_bit_weights_in_double_precision():
    """bitsandbytes has no fp64: what it is asked for must stay fp32 where the model's own code computes in fp64."""
    pytest.importorskip("bitsandbytes")
    model = zoo.adapt(zoo.quantize(zoo.make("llama"))).train()
    batch, twin = zoo.batch(), twin_of(model, torch.float64)
    with mode(torch.float64):
        losses = [twin(**batch).loss.item() for _ in range(3)]
    assert losses == pytest.approx([model(**batch).loss.item()] * 3, rel=1e-5)


@pytest.mark.parametrize("adapter", [{}, {"use_dora": True}], ids=str)
def test_the_reference_has_the_values_that_codes_represent(adapter):
    """Not what bitsandbytes makes of them: on a CPU with AVX512 rows that share a block got each other's scales, so that
    a right step failed, and `nf4` was switched off. DoRA took norms of weights that were requested in fp64, which is
    memory as it was: then any step passed."""
    pytest.importorskip("bitsandbytes")
    model, dense = packed.exact_pair(**adapter)
    (loss, true), batch = zoo.step(dense, zoo.batch()), zoo.batch()
    with mode(torch.float64):
        value, got = zoo.step(twin_of(model, torch.float64), batch)
    assert abs(value - loss) < 1e-5 and max(zoo.errors(got, true).values()) < 1e-4
    assert all(gradient.dtype is torch.float64 for gradient in got.values())


@pytest.mark.parametrize("over", [False, True])
def test_experts_in_4_bits_in_double_precision(over):
    """Of a model that is not optimized, whose stacks bitsandbytes dequantises: it refuses fp64."""
    pytest.importorskip("bitsandbytes")
    model, dense = packed.pair("qwen3_moe", adapted=over, num_hidden_layers=1)
    (loss, true), batch = zoo.step(dense, zoo.batch()), zoo.batch()
    with mode(torch.float64):
        value, got = zoo.step(twin_of(model, torch.float64), batch)
    assert abs(value - loss) < 1e-5
    assert max(zoo.errors(packed.named(model, got), packed.named(dense, true), 1e-3).values()) < 1e-4


def plant(monkeypatch, change):
    """A fault in what is lowered: `change(graph, product)` of the last matrix product of each backward."""

    def run(graph, context):
        products = [node for node in graph.nodes if node.target is aten.mm.default]
        if products and any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes):
            change(graph, products[-1])

    monkeypatch.setattr(tunecompile.passes, "PIPELINE", [*tunecompile.passes.PIPELINE, Pass("planted", "lower", run)])


def scaled(graph, product):
    with graph.inserting_after(product):
        wrong = graph.call_function(aten.mul.Tensor, (product, 1.01))
    wrong.meta = dict(product.meta)
    product.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)


def swapped(graph, product):
    with graph.inserting_before(product):
        wrong = graph.call_function(aten.flip.default, (product.args[0], [0]))
    wrong.meta = dict(product.args[0].meta)
    product.update_arg(0, wrong)


def test_a_planted_fault_is_caught(monkeypatch):
    plant(monkeypatch, swapped)
    result = verified(build(attends=False))
    failed = [verdict for verdict in result.verdicts if not verdict.passed]
    assert (
        not result.passed
        and any("no gradient error above" in verdict.name for verdict in failed)
        and "FAILED" in str(result)
    )


def test_the_model_is_left_as_it_was(monkeypatch):
    attach = verification.attach
    monkeypatch.setattr(
        verification, "attach", lambda model, settings: attach(model, replace(settings, executor="eager"))
    )
    torch.manual_seed(5)
    model = build(lora_dropout=0.1)
    zoo.step(model, zoo.batch())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    state, gradients = (
        copy.deepcopy(model.state_dict()),
        [p.grad.clone() for p in model.parameters() if p.requires_grad],
    )
    random = torch.get_rng_state()
    result = tunecompile.verify(model, zoo.batch())  # optimized for the step only
    assert has(result, "dropout-off")
    assert torch.equal(random, torch.get_rng_state()) and all(
        torch.equal(v, state[k]) for k, v in model.state_dict().items()
    )
    assert all(torch.equal(p.grad, g) for p, g in zip((p for p in model.parameters() if p.requires_grad), gradients))
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.1} and model.training
    assert not any(module._compiled_call_impl for module in model.modules())


@pytest.mark.slow
def test_a_fresh_adapter_says_something_of_every_gradient():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        zoo.make("llama"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    ).train()
    result = verified(model)
    assert result.passed and all(row["has_gradient"] for row in result.gradients) and has(result, "zeros-replaced")
    assert not any(p.any() for name, p in model.named_parameters() if "lora_B" in name)


def test_what_never_trains_is_named():
    model = build()
    model.base_model.model.extra = nn.Linear(4, 4)
    result = verified(model)
    assert result.untrained == [
        "base_model.model.extra.weight",
        "base_model.model.extra.bias",
    ] and "without a gradient, in eager too" in str(result)


@pytest.mark.parametrize(
    "why, spoil",
    [
        ("evaluation mode", lambda model: model.eval()),
        ("nothing in the model is trained", lambda model: model.requires_grad_(False)),
        (
            "act as soon as they have a gradient",
            lambda model: next(p for p in model.parameters() if p.requires_grad).register_post_accumulate_grad_hook(
                print
            ),
        ),
    ],
)
def test_what_cannot_be_verified(why, spoil):
    model = build()
    spoil(model)
    with pytest.raises(CannotVerify, match=why):
        tunecompile.verify(model, zoo.batch())


@pytest.mark.gpu
def test_generated_code_on_a_gpu():
    pytest.importorskip("bitsandbytes")
    model = zoo.make(
        "llama",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=8192,
        max_position_embeddings=1024,
    )
    model = zoo.adapt(zoo.quantize(model.to("cuda", torch.bfloat16), torch.bfloat16), r=16).train()
    with torch.autocast("cuda", torch.bfloat16):
        result = tunecompile.verify(tunecompile.optimize(model), zoo.batch(8192, 4, 512, "cuda"))
    assert result.passed, str(result)


def test_the_rewrite_at_fault_is_found_and_switched_off(monkeypatch):
    monkeypatch.setattr(tunecompile.passes, "PIPELINE", planted_passes(1.01))
    model = tunecompile.optimize(build(attends=False), executor="eager")
    result = tunecompile.verify(model, zoo.batch())
    assert (
        not result.passed
        and result.faults[0]["rewrite"] == "planted: wrong"
        and len(result.faults) == 1
        and has([fault["said"] for fault in result.faults], "rewrite-switched-off")
    )
    assert any("modeling_llama.py" in place or "activations.py" in place for place in result.faults[0]["places"]), (
        result.faults
    )
    assert has(model, "rewrite-switched-off", subject="planted: wrong")
    again = tunecompile.verify(model, zoo.batch())
    assert again.passed and not again.faults
    assert {m.family for m in tunecompile.report(model).matches} >= {"rms_norm", "swiglu"}


@pytest.mark.gpu  # needs none, but half a minute
def test_a_fault_that_no_rewrite_makes(monkeypatch):
    plant(monkeypatch, scaled)
    result = verified(build())
    assert result.faults[0]["rewrite"] is None and "without any rewrite" in str(result)


def test_a_forward_that_was_replaced(monkeypatch):
    """By one whose closure has the model's own, as TRL's does: the copies are run, and not the model thrice."""
    plant(monkeypatch, swapped)
    model = build(attends=False)
    original = model.forward
    model.forward = types.MethodType(lambda self, *args, **kwargs: original(*args, **kwargs), model)
    assert not verified(model).passed


def test_a_loss_without_what_is_trained():
    model = support.small().train()
    aside = nn.Parameter(torch.ones(()))
    with pytest.raises(CannotVerify, match="no trained parameter gets a gradient"):
        tunecompile.verify(model, zoo.batch(), loss=lambda model, batch: aside * 2)


def test_a_batch_without_any_gradient():
    """Of an adapter that waits for tokens which are not there, say."""
    (row,) = compare_gradients(*[{"a": torch.zeros(3)}] * 3, torch.float32)
    assert row["error"] == row["norm_ratio"] == 0 and row["has_gradient"]


def test_zeros_that_the_reference_has_too_are_gradients():
    zeros, ones = torch.zeros(4, 4), torch.ones(4, 4)
    rows = compare_gradients(
        {"idle": zeros, "busy": ones}, {"idle": zeros, "busy": ones}, {"idle": zeros, "busy": ones}, torch.float32
    )
    assert all(row["has_gradient"] and row["error"] == 0 for row in rows)
    _, busy = compare_gradients(
        {"idle": zeros, "busy": ones}, {"idle": zeros, "busy": ones}, {"idle": zeros}, torch.float32
    )
    assert not busy["has_gradient"]


@pytest.mark.slow
def test_bad_luck_switches_nothing_off(monkeypatch):
    """An error that is larger than eager's by less than a factor of two fails, and is no reason to look for a rewrite."""
    monkeypatch.setattr("tunecompile.verification.tolerance.LIMIT", 1e-9)
    model = tunecompile.optimize(build(), executor="eager")
    result = tunecompile.verify(model, zoo.batch())
    assert not result.passed and not result.faults and not find(model, "rewrite-switched-off")


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapter",
    [
        support.activated,
        support.other("FourierFTConfig", n_frequency=16),
        support.with_peft("PrefixTuningConfig", num_virtual_tokens=4),
    ],
    ids=["reads the batch in a hook", "makes tensors of no named dtype", "fills a cache"],
)
def test_adapters_whose_layers_are_not_computed_again_as_they_were(adapter):
    """What one reads of the batch, or adds to a cache, is there in the forward alone."""
    result = verified(adapter().train(), seed=0)
    assert result.passed and result.reference == "float64", str(result)
