"""The public functions: what `optimize` leaves as it was, what `restore` puts back, what copies, adapters and savers see."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_same_flattened, assert_same_step
from tests.support.models.pairs import attending, compiled_slots, of_plain_layers, optimized, small
from tests.support.notes import has
from tests.support.reports import flattened
from tunecompile.errors import NotAModule, NotOptimized
from tunecompile.runtime import attach
from tunecompile.runtime.parts.layers import EntryHook

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def anatomy(model: nn.Module) -> dict:
    """Every attribute of every submodule, by identity; dictionaries (parameters, hooks) entry by entry."""

    def look(value):
        return (
            {key: id(item) for key, item in value.items()}
            if isinstance(value, dict)
            else id(value)
            if not isinstance(value, (bool, int))
            else value
        )

    return {(name, key): look(value) for name, module in model.named_modules() for key, value in vars(module).items()}


# -- what stays ---------------------------------------------------------------------------------------------------------


def identity(model: nn.Module) -> tuple:
    modules = [(name, type(module)) for name, module in model.named_modules()]
    return type(model), list(model.state_dict()), [id(p) for p in model.parameters()], modules


def test_the_model_stays_what_it_was_and_is_restored_exactly():
    """Optimizing twice is optimizing once."""
    model = small()
    before, parts = anatomy(model), identity(model)
    assert optimized(model) is model
    attached = anatomy(model)
    assert optimized(model) is model and anatomy(model) == attached != before
    zoo.step(model, zoo.batch())
    assert identity(model) == parts and anatomy(model) != before
    assert tunecompile.restore(model) is model and anatomy(model) == before


def test_other_settings_of_an_optimized_model_are_told_of(caplog):
    model = optimized(small())
    tunecompile.optimize(model, executor="eager")
    assert not caplog.records
    tunecompile.optimize(model, executor="eager", memory="1GiB")
    assert "is optimized already, with other settings" in caplog.text


@pytest.mark.slow
def test_a_second_wrapper_takes_over():
    """Of adapters around a base that was optimized under the first one."""
    peft = pytest.importorskip("peft")
    base = small()
    first = optimized(zoo.adapt(base, target_modules=["q_proj", "v_proj"]))
    zoo.step(first, zoo.batch())
    reference = zoo.adapt(copy.deepcopy(base), target_modules=["q_proj", "v_proj"])
    second = tunecompile.optimize(
        peft.PeftModelForCausalLM(first.unload(), first.peft_config["default"]), executor="eager", memory="1MiB"
    )
    torch.manual_seed(0)
    for (name, p), (_, q) in zip(second.named_parameters(), reference.named_parameters()):
        if p.requires_grad:
            nn.init.normal_(p, std=0.1)
            q.data.copy_(p.data)
    assert_same_flattened(second, reference, padded(), limit=1e-4)
    report = tunecompile.report(second)
    assert has(second, "taken-over", subject=type(first).__name__) and flattened(second) == 1
    assert report.memory is not None and report.compiles and not has(second, "compiled-already")
    with pytest.raises(NotOptimized):
        tunecompile.report(first)
    tunecompile.restore(second)
    assert not [module for module in second.modules() if module._compiled_call_impl is not None]


def test_switched_off_by_the_environment(monkeypatch):
    monkeypatch.setenv("TUNECOMPILE", "0")
    model = small()
    before = anatomy(model)
    assert optimized(model) is model and anatomy(model) == before
    with pytest.raises(NotOptimized):
        tunecompile.report(model)


def test_errors_name_cause_and_mend():
    with pytest.raises(NotAModule, match="got str"):
        tunecompile.optimize("meta-llama/Llama-3.1-8B")
    model = small()
    for function in (tunecompile.report, tunecompile.restore):
        with pytest.raises(NotOptimized, match="optimize"):
            function(model)
    tunecompile.restore(optimized(model))
    with pytest.raises(NotOptimized):
        tunecompile.restore(model)


# -- copies and files ---------------------------------------------------------------------------------------------------


def test_copies_work_and_are_not_optimized():
    model = optimized(of_plain_layers())
    zoo.step(model, zoo.batch())
    compiles = tunecompile.report(model).compiles
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert not compiled_slots(twin)
        with pytest.raises(NotOptimized):
            tunecompile.report(twin)
    assert_same_step(twin, model)
    assert tunecompile.report(model).compiles == compiles
    assert_same_step(optimized(twin), model)
    assert len(compiled_slots(twin)) == 5  # the owner of the layers, two of them, the last norm and the head


def test_saved_and_loaded_as_before(tmp_path):
    import transformers

    model = optimized(small())
    zoo.step(model, zoo.batch())
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert_same_step(loaded, model)
    with torch.no_grad():
        loaded.model.layers[0].mlp.up_proj.weight.mul_(2)
    model.load_state_dict(loaded.state_dict())  # resuming: the same graphs, other weights
    compiles = tunecompile.report(model).compiles
    assert_same_step(model, loaded)
    assert tunecompile.report(model).compiles == compiles


# -- evaluation ---------------------------------------------------------------------------------------------------------


def test_eval_and_generate_are_as_before_and_compile_nothing():
    model, reference = small(), small()
    optimized(model)
    ids = zoo.batch()["input_ids"]
    for training in (False, True):  # generate() in the middle of training too
        for m in (model, reference):
            m.train(training)
        kwargs = dict(attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert torch.equal(model.generate(ids, **kwargs), reference.generate(ids, **kwargs))
        with torch.no_grad():
            ours, theirs = model(ids), reference(ids)
        assert type(ours.logits) is torch.Tensor and torch.equal(ours.logits, theirs.logits)
        assert (ours.past_key_values is None) == (theirs.past_key_values is None)
    model.eval()
    model(ids).logits.sum().backward()  # gradients in evaluation: attributions, say
    assert tunecompile.report(model).compiles == 0
    assert "nothing is compiled yet" in str(tunecompile.report(model))


def test_an_evaluation_does_not_pack_4_bit_weights():
    """With packed ones, which bitsandbytes makes on some CPUs, gradients would stop at every linear."""
    linear = pytest.importorskip("bitsandbytes").nn.Linear4bit
    model = zoo.adapt(zoo.quantize(of_plain_layers()), target_modules=["inner"])
    linears = [module for module in model.modules() if isinstance(module, linear)]
    for module in linears:
        module.support_avx512bf16_for_cpu = True
    optimized(model)
    _, before = zoo.step(model, zoo.batch())
    with torch.no_grad():
        model.eval()(**zoo.batch())
    _, after = zoo.step(model, zoo.batch())
    assert len(linears) == 2 and not any(
        hasattr(module.weight.quant_state, "packing_format_for_cpu") for module in linears
    )
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    tunecompile.restore(model)
    assert all(module.support_avx512bf16_for_cpu for module in linears)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_users_cache_is_left_alone(name):
    from transformers import DynamicCache

    model, reference = attending(), attending()
    if name not in inspect.signature(reference.forward).parameters and name == "cache":
        pytest.skip("the name of transformers 5.24")
    optimized(model).train(), reference.train()
    batch = padded()
    for asked in ({}, {"use_cache": True}):
        caches = DynamicCache(), DynamicCache()
        ours, theirs = (
            m(**batch, **asked, **{name: cache}) for m, cache in zip((model, reference), caches, strict=True)
        )
        assert [cache.get_seq_length() for cache in caches] == [batch["input_ids"].shape[1]] * 2
        assert getattr(ours, name) is caches[0] and torch.allclose(ours.loss, theirs.loss, atol=1e-6)
    assert not flattened(model) and has(model, "padding-kept", reason="cache-used")


def test_layers_in_a_loop():
    """By default the model makes a cache, in which a second call of a layer finds the keys of the first."""
    model = attending().train()
    first, second = model.model.layers
    model.model.layers = nn.ModuleList([first, second, first, second])
    model.config.num_hidden_layers = 4
    reference = copy.deepcopy(model)
    optimized(model)
    for seed in range(2):
        (loss, ours), (exact, theirs) = (
            zoo.step(each, {**zoo.batch(seed=seed), **given})
            for each, given in ((model, {}), (reference, {"use_cache": False}))
        )
        assert torch.allclose(loss, exact, rtol=1e-5)
        assert all(torch.allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-6) for name in theirs)
    assert has(model, "called-again")


# -- several models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gpu, executor, started", [(True, "inductor", [None]), (True, "eager", []), (False, "inductor", [])]
)
def test_workers_start_before_the_model_is_moved_to_the_gpu(gpu, executor, started, monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(attach, "start_compile_workers", made.append)
    tunecompile.optimize(nn.Linear(2, 2), executor=executor)
    assert made == started  # Triton's driver would choose a GPU


def test_each_owners_call_looks_at_its_own_layers():
    """At every step, so that a model with a tower, mergers and a decoder does not look at all of them three times."""
    import transformers

    halves = {f"{half}_layers": 2 for half in ("encoder", "decoder")}
    halves |= {f"{half}_attention_heads": 2 for half in ("encoder", "decoder")}
    model = transformers.BartModel(transformers.BartConfig(vocab_size=16, d_model=8, **halves))
    tunecompile.optimize(model, executor="eager")
    hooks = [h for m in model.modules() for h in m._forward_pre_hooks.values() if isinstance(h, EntryHook)]
    seen = [slot for hook in hooks for slot in hook.slots]
    state = model._tunecompile
    assert len(hooks) == 2 and len(seen) == len(set(seen)) == len([*state.slots, *state.norms])
