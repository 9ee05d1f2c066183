"""Router logits of batches without padding: a trainer's router loss counts the same tokens; whoever may read others keeps them."""

import ast
import copy
import importlib
from pathlib import Path

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.notes import EAGER, find, has
from tests.support.reports import flattened
from tunecompile.integrations import loss_caller
from tunecompile.notes import note
from tunecompile.runtime.step.rows_refused import RowsRefused
from tunecompile.runtime.unpad.handed_on import RowCall

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


def called_by(home: str, function: str):
    """A function of a package's that runs a step and takes the loss alone."""
    space = {"__name__": home}
    exec(f"def {function}(model, inputs): return model(**inputs).loss", space)
    return space[function]


by_trainer = called_by("transformers.trainer", "training_step")


def rows(*lengths: int, **more) -> dict:
    ids = torch.randint(3, 60, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(sum(lengths)))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "output_router_logits": True} | more


def trained_routers(family: str):
    """Adapters over experts, and routers that are trained: their gradients have a share of the router's loss."""
    model = zoo.make(family, num_hidden_layers=2, router_aux_loss_coef=0.5)
    over = [f"mlp.experts.{part}" for part in ("gate_up_proj", "down_proj")]
    model = zoo.adapt(model, target_modules=["q_proj"], target_parameters=over)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name.endswith(("gate.weight", "router.weight")))
    return tunecompile.optimize(copy.deepcopy(model), executor="eager"), model


def assert_same(ours, model, inputs: dict, loss=by_trainer) -> None:
    (true, expected), (mine, got) = (zoo.step(each, inputs, loss=loss) for each in (model, ours))
    assert abs(mine - true) < 1e-5 and max(zoo.errors(got, expected, 1e-3).values()) < 1e-4
    assert any(name.endswith(("gate.weight", "router.weight")) and grad.any() for name, grad in got.items())


def test_a_trainers_router_loss_needs_no_padding(monkeypatch):
    """Its logits are [B * T, experts] of each layer, zero at padding, and eager's elsewhere. Others may read that."""
    ours, model = trained_routers("qwen3_moe")
    batches, seen = [rows(20, 13), rows(9, 31), rows(17, 17), rows(22, 12)], []
    home = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    real = home.load_balancing_loss_func

    def load_balancing_loss_func(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        seen.append(gate_logits)
        return real(gate_logits, num_experts, top_k, attention_mask)

    monkeypatch.setattr(home, "load_balancing_loss_func", load_balancing_loss_func)
    for inputs in batches:
        seen.clear()
        assert_same(ours, model, inputs)
        mask = inputs["attention_mask"].flatten().bool()
        assert len(seen[0]) == len(seen[1]) == 2
        for expected, got in zip(*seen):
            assert got.shape == expected.shape and not got[~mask].any()
            torch.testing.assert_close(got[mask], expected[mask], rtol=1e-4, atol=1e-5)
    report, padding = tunecompile.report(ours), sum(not bool(each["attention_mask"].all()) for each in batches)
    assert flattened(ours) == padding and report.compiles == 1 and not find(report, *EAGER, "padding-kept"), report
    # a loop of the user's has them in the output, and so has a loss of the user's that calls a trainer's
    for loss in (called_by("somewhere", "training_step"), by_users):
        assert_same(ours, model, rows(20, 13), loss)
    assert flattened(ours) == padding and has(ours, "output-required", subject="output_router_logits")
    assert_same(ours, model, rows(20, 13))
    assert flattened(ours) == padding + 1


def by_users(model, inputs: dict) -> torch.Tensor:
    """Inside a trainer's step, the user's code is given the whole output."""
    space = {"__name__": "transformers.trainer", "compute_loss": lambda m, b: m(**b).loss}
    exec("def training_step(model, inputs): return compute_loss(model, inputs)", space)
    return space["training_step"](model, inputs)


def test_a_router_that_keeps_its_logits_keeps_the_padding():
    """Whoever reads the attribute expects those of the whole batch."""
    ours, model = trained_routers("qwen3_moe")
    for each in (ours, model):
        for module in each.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(lambda module, args, output: setattr(module, "kept", output[0]))
    assert_same(ours, model, rows(20, 13))
    routers = [m for each in (ours, model) for m in each.modules() if type(m).__name__.endswith("TopKRouter")]
    assert all(router.kept.shape[0] == 40 for router in routers)
    assert not flattened(ours)


def test_every_forward_of_transformers_gives_its_router_loss_the_mask():
    """What `loss_caller` takes for granted of functions that have such a parameter."""
    name, calls = loss_caller._ROUTER_LOSS, 0
    for home in Path(transformers.models.__path__[0]).glob("*/modeling_*.py"):
        if f"{name}(" not in (text := home.read_text()):
            continue
        tree = list(ast.walk(ast.parse(text)))
        losses = [node for node in tree if isinstance(node, ast.FunctionDef) and node.name == name]
        if not any(each.arg == "attention_mask" for loss in losses for each in loss.args.args):
            continue
        for node in tree:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name:
                given = [ast.unparse(each) for each in (*node.args, *(keyword.value for keyword in node.keywords))]
                assert any(each.endswith("attention_mask") for each in given), (home.name, given)
                calls += 1
    assert calls > 20


@pytest.mark.slow
def test_logits_of_a_row_that_is_refused_are_taken_back(monkeypatch):
    """Whole rows of attention that is written out run as documents; these run again as they come, and count once."""

    def refuse(*_):
        raise RowsRefused(note("output-holds-more"))

    from transformers.models.gpt_oss import modeling_gpt_oss as home

    real, counts = home.load_balancing_loss_func, []

    def load_balancing_loss_func(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        counts.append(len(gate_logits))
        return real(gate_logits, num_experts, top_k, attention_mask)

    monkeypatch.setattr(home, "load_balancing_loss_func", load_balancing_loss_func)
    monkeypatch.setattr(RowCall, "hand_on", refuse)
    ours, model = trained_routers("gpt_oss")
    assert_same(ours, model, rows(17, 17))
    assert counts == [2, 2]
    assert has(ours, "packing-kept", reason="output-holds-more"), tunecompile.report(ours)
