"""What a compiled step assumes of the world outside its graphs. Each row is changed between two steps, and the next step is
eager's all the same.

How each change is noticed: Dynamo's guards (functions that a layer looks up, attributes, flags of modules, weights' dtypes), the key
of a call (gradients, hooks), a look at each step (modules inside layers, the head, members of module lists, functions of
`torch.nn.functional`), or not at all because the graph takes it as an input (values of weights and buffers).
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import pair

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
ACTS = {}


def act(function):
    ACTS[function.__name__.replace("_", " ")] = function
    return function


@contextlib.contextmanager
def attribute(holder, name, value):
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


# -- functions that are looked up -----------------------------------------------------------------------------------------


@act
def a_function_of_the_models_file(models):
    code = transformers.models.llama.modeling_llama
    rotate = code.apply_rotary_pos_emb
    return attribute(code, "apply_rotary_pos_emb", lambda q, k, cos, sin, *a, **o: rotate(q, k, cos, -sin, *a, **o))


@act
def the_mask_function(models):
    code = transformers.models.llama.modeling_llama
    mask = code.create_causal_mask
    return attribute(
        code, "create_causal_mask", lambda *a, **o: mask(*a, **{**o, "and_mask_function": lambda b, h, q, k: q - k < 3})
    )


@act
def attention_in_the_table(models):
    table = type(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS)
    stock = table._global_mapping["sdpa"]

    def sharper(module, query, key, value, mask, scaling=None, **kwargs):
        return stock(module, query, key, value, mask, scaling=scaling * 2, **kwargs)

    return attribute(table, "_global_mapping", {**table._global_mapping, "sdpa": sharper})


@act
def the_forward_of_a_class(models):
    kind = type(models[0].model.layers[0].mlp)
    forward = kind.forward
    return attribute(kind, "forward", lambda self, x: forward(self, x) * 2)


@act
def the_forward_of_an_instance(models):
    stack = contextlib.ExitStack()
    for m in models:
        mlp = m.model.layers[1].mlp
        mlp.forward = lambda x, mlp=mlp: type(mlp).forward(mlp, x) * 0.5
        stack.callback(vars(mlp).pop, "forward")
    return stack


@act
def an_activation(models):
    for m in models:
        m.model.layers[0].mlp.act_fn = nn.GELU()


# -- modules and hooks ----------------------------------------------------------------------------------------------------


@act
def a_hook_that_changes_a_result(models):
    for m in models:
        m.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 1.5)


@act
def a_module_in_a_layer(models):
    for m in models:
        m.model.layers[1].mlp = nn.Sequential(m.model.layers[1].mlp, nn.Tanh())


@act
def the_order_of_layers(models):
    for m in models:
        m.model.layers = nn.ModuleList(reversed(m.model.layers))


@act
def a_layer_fewer(models):
    for m in models:
        del m.model.layers[0]
        m.model.layers[0].self_attn.layer_idx = 0
        m.config.num_hidden_layers = 1


@act
def a_copied_layer(models):
    for m in models:
        m.model.layers[1] = copy.deepcopy(m.model.layers[1])


@act
def the_head(models):
    torch.manual_seed(7)
    head = nn.Linear(64, 256, bias=True)
    for m in models:
        m.set_output_embeddings(copy.deepcopy(head))


@act
def the_final_norm(models):
    for m in models:
        m.model.norm = nn.Identity()


# -- numbers, flags and weights -------------------------------------------------------------------------------------------


@act
def a_number_of_a_module(models):
    for m in models:
        for layer in m.model.layers:
            layer.self_attn.scaling *= 2


@act
def an_epsilon(models):
    for m in models:
        m.model.layers[0].input_layernorm.variance_epsilon = 0.1


@act
def weights_in_place(models):
    with torch.no_grad():
        for m in models:
            m.model.layers[0].mlp.up_proj.weight.mul_(2)


@act
def a_weight_by_another(models):
    for m in models:
        weight = m.model.layers[0].mlp.up_proj.weight
        m.model.layers[0].mlp.up_proj.weight = nn.Parameter(weight.detach() * 2)


@act
def the_data_of_a_weight(models):
    for m in models:
        weight = m.model.layers[0].self_attn.q_proj.weight
        weight.data = weight.data.flip(0).contiguous()


@act
def a_frozen_layer(models):
    for m in models:
        m.model.layers[0].requires_grad_(False)


@act
def frozen_embeddings(models):
    for m in models:
        m.model.embed_tokens.requires_grad_(False)


@act
def another_dtype(models):
    for m in models:
        m.double()


@act
def frequencies_in_a_buffer(models):
    for m in models:
        m.model.rotary_emb.inv_freq.mul_(0.5)


@act
def one_weight_for_two_layers(models):
    for m in models:
        m.model.layers[1].mlp.up_proj.weight = m.model.layers[0].mlp.up_proj.weight


# -- the world ------------------------------------------------------------------------------------------------------------


@act
def deterministic_algorithms(models):
    torch.use_deterministic_algorithms(True)
    stack = contextlib.ExitStack()
    stack.callback(torch.use_deterministic_algorithms, False)
    return stack


@act
def a_function_of_torch(models):
    silu = F.silu
    return attribute(F, "silu", lambda x, inplace=False: silu(x) * 0.5)


@act
def the_cache_setting(models):
    for m in models:
        m.config.use_cache = False


@act
def checkpointing(models):
    for m in models:
        m.gradient_checkpointing_enable()


#: rows that `make test` leaves to `make test-all`: another row is noticed in the same way
_FURTHER = {
    *("an epsilon", "a number of a module", "a frozen layer", "frozen embeddings", "another dtype", "weights in place"),
    *("the cache setting", "deterministic algorithms", "checkpointing", "frequencies in a buffer", "the final norm"),
    *(
        "a function of the models file",
        "a layer fewer",
        "the order of layers",
        "a copied layer",
        "an activation",
        "one weight for two layers",
    ),
    *("the head", "attention in the table", "the mask function", "the forward of a class", "a module in a layer"),
    *("a hook that changes a result", "the data of a weight", "the forward of an instance", "a function of torch"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _FURTHER)) for n in ACTS])
def test_a_change_between_two_steps(name):
    model, reference = pair(lambda: zoo.make("llama", num_hidden_layers=2))
    for m in (model, reference):
        m.train()
    assert_same_flattened(model, reference, padded())
    before = zoo.step(reference, padded())
    with ACTS[name]((model, reference)) or contextlib.nullcontext():
        for seed in (0, 1):
            assert_same_flattened(model, reference, padded(seed=seed))
        if name not in (
            "deterministic algorithms",
            "the cache setting",
            "checkpointing",
            "another dtype",
            "a copied layer",
        ):
            assert _differ(before, zoo.step(reference, padded())), "the change does nothing"
    assert_same_flattened(model, reference, padded())


def _differ(before, after) -> bool:
    (loss, gradients), (now, others) = before, after
    return loss.item() != now.item() or gradients.keys() != others.keys()


@pytest.mark.slow
def test_autocast_comes_and_goes():
    model, reference = pair(lambda: zoo.make("llama", num_hidden_layers=2))
    for dtype in (None, torch.bfloat16, None):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            (loss, found), (expected, gradients) = (zoo.step(m, padded()) for m in (model, reference))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-3 if dtype else 1e-5)
        assert max(zoo.errors(found, gradients, 1e-4).values()) < (0.1 if dtype else 1e-4)


def test_dropout_of_a_part_that_is_set_to_evaluation():
    def build():
        model = zoo.make("llama", num_hidden_layers=2)
        for layer in model.model.layers:
            layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.5))
        return model

    model, reference = pair(build)
    for training in (True, False, True):
        for m in (model, reference):
            m.train()
            for layer in m.model.layers:
                layer.mlp[1].train(training)
        losses = []
        for m in (model, reference):
            torch.manual_seed(3)
            losses.append(m(**zoo.batch()).loss.item())
        assert training or losses[0] == pytest.approx(losses[1], rel=1e-5)
        drops = abs(losses[0] - model.eval()(**zoo.batch()).loss.item()) > 1e-6
        assert drops == training
