"""Dense frozen weights that stand with their adapters: the same gradients whatever happens to weights, adapters and the order of calls."""

import copy
import dataclasses
import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import tunecompile
from tests.support import zoo
from tests.support.memory.cpu_recorder import CpuRecorder
from tests.support.memory.weight_cache import (
    accumulated,
    add,
    assert_same_by_element,
    gradients,
    interleaved,
    kept,
    step,
)
from tunecompile.ops import lora_linear
from tunecompile.runtime.cuda_graphs import launch_bound, recording, replay
from tunecompile.runtime.memory.weight_move import matrix_of, move_in, move_out, stand
from tunecompile.runtime.parts.dense_weights import DenseWeights

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def gpu_paths(monkeypatch):
    """On a CPU nothing moves, and the reference would read W only; these read whole matrices."""
    monkeypatch.setattr("tunecompile.runtime.parts.dense_weights.MOVES_ON", (["cpu"],))
    for op in (lora_linear, lora_linear.backward_op):
        monkeypatch.setattr(
            op,
            "providers",
            [
                dataclasses.replace(p, refuses=lambda *_: None) if p.name in ("k_extension", "grouped") else p
                for p in op.providers
            ],
        )


def build(optimized=True, family="llama", memory=None, **options):
    model = zoo.adapt(zoo.make(family, num_hidden_layers=2), **options).train()
    return tunecompile.optimize(model, memory=memory, executor="eager") if optimized else model


def moved(model):
    """The layers' weights that are rows of a matrix."""
    assert all(p.is_contiguous() for p in model.parameters())
    return [
        name for name, p in model.named_parameters() if ".layers." in name and p.untyped_storage().nbytes() > p.nbytes
    ]


def compilations(model):
    return sum(variant.graphs for region in model._tunecompile.regions for variant in region.variants.values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"lora_dropout": 0.3},
                {"use_rslora": True, "target_modules": ["q_proj", "up_proj", "down_proj"]},
                {"family": "qwen2"},
            )
        ),
    ],
)
def test_training_is_the_same_and_compiles_once(options):
    model, reference = build(**options), build("lora_dropout" in options, **options)
    if "lora_dropout" in options:
        reference._tunecompile.kept.moves = False
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, reference)
    ]

    for _ in range(3):
        assert_same_by_element(model, reference, accumulated)
        for optimizer in optimizers:
            optimizer.step()
    assert len(moved(model)) == 2 * len(options.get("target_modules", range(7))) and compilations(model) == 1, (
        tunecompile.report(model)
    )
    assert not kept(model).bytes and not tunecompile.report(model).notes


def test_nothing_else_moves_and_all_moves_back():
    model = build(target_modules=["q_proj", "v_proj"])
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model)
    assert len(moved(model)) == 4 and all("q_proj" in name or "v_proj" in name for name in moved(model))
    for name, p in model.named_parameters():
        assert torch.equal(p, whole[name]), name
    tunecompile.restore(model)
    assert not moved(model)
    for name, p in model.named_parameters():
        assert torch.equal(p, whole[name]), name


def test_weights_that_are_written_or_replaced():
    """Merging adds to the weights in ways that nothing counts; `.to(device)` gives them other memory; a parameter may be another one."""
    model, reference = build(), build(False)
    assert_same_by_element(model, reference)
    for m in (model, reference):
        m.merge_adapter()
        m.unmerge_adapter()
        for p in m.parameters():
            p.data.mul_(1.01)
    assert_same_by_element(model, reference)
    held = len(kept(model).moved)
    for m in (model, reference):
        for p in m.parameters():
            p.data = p.data.clone()
    assert_same_by_element(model, reference)
    for m in (model, reference):
        for module in m.modules():
            if isinstance(module, torch.nn.Linear) and not module.weight.requires_grad:
                module.weight = torch.nn.Parameter(module.weight.data, requires_grad=False)
    assert_same_by_element(model, reference)
    assert_same_by_element(model, reference)
    assert len(kept(model).moved) == held and len(moved(model)) == 14


@pytest.mark.slow
def test_the_model_holds_their_memory():
    """Where it goes to another device, nothing stays behind."""
    model = build()
    step(model)
    matrices = [StorageWeakRef(matrix.weights[0]().untyped_storage()) for matrix in kept(model).moved.values()]
    kept(model).writers.clear()  # on a CPU it holds what it writes
    gc.collect()
    assert len(matrices) == 8 and not any(ref.expired() for ref in matrices)
    for p in model.parameters():
        p.data = p.data.clone()
    assert all(ref.expired() for ref in matrices)


@pytest.mark.slow
def test_adapters_of_other_targets_and_ranks():
    targets = ["q_proj", "k_proj", "v_proj"]
    model, reference = build(target_modules=targets), build(False, target_modules=targets)
    for m in (model, reference):
        for name, those, rank in (("one", ["q_proj"], 4), ("large", targets, 70)):
            add(m, name, target_modules=set(those), r=rank)
    for name in ("default", "one", "large", "default", "one"):
        for m in (model, reference):
            m.set_adapter(name)
        assert_same_by_element(model, reference)
        assert_same_by_element(model, reference)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, 70])
def test_another_adapter_between_forward_and_backward(rank):
    model, reference = build(), build(False)
    for m in (model, reference):
        add(m, "other", r=rank)

    assert_same_by_element(model, reference, interleaved)
    assert_same_by_element(model, reference, interleaved)


@pytest.mark.slow
def test_evaluation_reference_and_checkpoints_between_steps():
    model, reference = build(), build(False)

    def run(m):
        with torch.no_grad(), m.disable_adapter():
            expected = m(**zoo.batch()).logits
        with torch.no_grad():
            m.eval()
            expected = expected + m(**zoo.batch()).logits
            m.train()
        m.zero_grad()
        m.gradient_checkpointing_enable({"use_reentrant": False})
        said = m(**zoo.batch())
        (said.loss + 1e-3 * (said.logits * expected).mean()).backward()
        m.gradient_checkpointing_disable()
        return said.loss.detach(), gradients(m)

    for _ in range(2):
        assert_same_by_element(model, reference, run)
        assert_same_by_element(model, reference)


@pytest.mark.slow
def test_copies_and_files_hold_what_the_model_does(tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    model, reference = build(), build(False)
    for m in (model, reference):
        step(m)
    other = tunecompile.optimize(copy.deepcopy(model), executor="eager")
    assert_same_by_element(other, reference)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    for name, value in reference.state_dict().items():
        assert all(
            torch.equal(held[name], value)
            for held in (torch.load(tmp_path / "state.pt"), load_file(tmp_path / "state.safetensors"))
        ), name
    model.load_state_dict({name: 2 * value for name, value in reference.state_dict().items()})
    reference.load_state_dict({name: 2 * value for name, value in reference.state_dict().items()})
    assert_same_by_element(model, reference)
    merged, expected = model.merge_and_unload(), reference.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(loaded[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
def test_recorded(monkeypatch):
    """A matrix stays where it is from replay to replay; one that was made anew is met by an address."""
    monkeypatch.setattr(replay, "CudaRecorder", CpuRecorder)
    monkeypatch.setattr(launch_bound, "SAMPLES", 2)
    model, reference = build(), build(False)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, reference)
    ]
    copied = []
    monkeypatch.setattr(
        recording,
        "copy_all",
        lambda targets, sources, real=recording.copy_all: (
            copied.extend(s.shape for s in sources),
            real(targets, sources),
        ),
    )
    for seed in range(9):
        if seed == 7:
            for p in model.parameters():
                p.data = p.data.clone()
        assert_same_by_element(model, reference, lambda m: step(m, seed=seed))
        for optimizer in optimizers:
            optimizer.step()
    assert model._tunecompile.replays.recorded >= 4, tunecompile.report(model)
    assert copied and not any(shape in {key[1] for key in kept(model).moved} for shape in copied)


class Patches(torch.nn.Module):
    """Joins each four neighbours of n patches, [n, 32], as towers' mergers do: the width 128 is 32 * (n // (n // 4)) there."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(128, 64), torch.nn.Linear(64, 128)

    def forward(self, hidden):
        joined = (2 * hidden).view(-1, 128)
        return hidden + self.down(torch.nn.functional.gelu(self.up(joined))).view(hidden.shape)


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Patches() for _ in range(2))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@pytest.mark.slow
def test_a_width_that_is_a_symbol_in_graphs_for_changing_sizes():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
    reference = peft.get_peft_model(Tower(), config).train()
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")

    def run(m, patches):
        m.zero_grad()
        loss = m(torch.randn(patches, 32, generator=torch.Generator().manual_seed(patches))).square().mean()
        loss.backward()
        return loss.detach(), gradients(m)

    for patches in (12, 20, 32, 12):
        assert_same_by_element(model, reference, lambda m: run(m, patches))
    assert len(kept(model).moved) == 4 and compilations(model) == 2


@pytest.mark.slow
def test_under_a_budget():
    model, reference = build(memory="4GiB"), build(False)
    for _ in range(2):
        assert_same_by_element(model, reference)
    budget = model._tunecompile.step.budget
    assert len(moved(model)) == 14 and not budget.memory.moving and not tunecompile.report(model).memory["kept_weights"]
    tight = build(memory=int(0.8 * tunecompile.report(model).memory["predicted_peak"]))
    for _ in range(2):
        assert_same_by_element(tight, reference)
    assert len(moved(tight)) == 14


@pytest.mark.slow
def test_on_the_device_where_accelerate_placed_them():
    hooks = pytest.importorskip("accelerate.hooks")
    model = zoo.make("llama", num_hidden_layers=2)
    for layer in model.model.layers:
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook("cpu"))
    model, reference = tunecompile.optimize(zoo.adapt(model).train(), executor="eager"), build(False)
    assert_same_by_element(model, reference)
    assert_same_by_element(model, reference)
    assert len(moved(model)) == 14


@pytest.mark.slow
@pytest.mark.parametrize("why", ["cpu", "gathered"])
def test_weights_that_stay_apart(why, monkeypatch):
    if why == "cpu":
        monkeypatch.undo()
    model, reference = build(), build(False)
    if why == "gathered":
        monkeypatch.setattr("tunecompile.runtime.layers.placed_layer.sharded", lambda parameter: True)
    assert_same_by_element(model, reference)
    assert not moved(model) and not kept(model).moved


@pytest.mark.parametrize("devices", [(0,), (0, 1)])
def test_weights_on_several_devices_stay_apart(devices):
    weights = [SimpleNamespace(device=torch.device("cpu", index)) for index in devices]
    slot = SimpleNamespace(stays=True, layer=SimpleNamespace(parameters=lambda: weights))
    cache = SimpleNamespace(moves=None, expect=lambda: None)
    DenseWeights().before_step(SimpleNamespace(kept=cache, slots=[slot], precision=None), None)
    assert cache.moves is (len(devices) == 1)


def test_weights_in_one_matrix():
    weights = [nn.Parameter(torch.full((rows, 4), float(rows)), requires_grad=False) for rows in (2, 3)]
    shape = (7, 4)
    assert not stand(weights, shape)
    move_in(weights, shape)
    assert stand(weights, shape) and not stand(weights[::-1], shape) and not stand(weights, (6, 4))
    matrix = matrix_of(shape, weights[0])
    assert (
        matrix.shape == shape
        and matrix._base is None
        and matrix.tolist()
        == [
            *([[2.0] * 4] * 2),
            *([[3.0] * 4] * 3),
            *([[0.0] * 4] * 2),
        ]
    )
    matrix.fill_(5.0)
    assert all(bool((weight == 5).all()) for weight in weights)
    move_out(weights[1])
    assert not stand(weights, shape) and bool((weights[1] == 5).all())
    matrix.zero_()
    assert bool((weights[1] == 5).all())


class OnGpu(torch.Tensor):
    """Says that it is."""

    is_cuda = property(lambda self: True)


def test_memory_that_weights_had_goes_back_to_the_gpu(monkeypatch):
    """No later allocation has its sizes."""
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    for kind, count in ((OnGpu, 1), (torch.Tensor, 1)):
        weights = [torch.full((rows, 3), 7.0).as_subclass(kind) for rows in (2, 1)]
        move_in(weights, (5, 3))
        assert len(emptied) == count and stand(weights, (5, 3))
        assert matrix_of((5, 3), weights[0]).tolist() == [[7.0] * 3] * 3 + [[0.0] * 3] * 2
