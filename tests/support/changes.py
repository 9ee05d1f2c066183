"""Changes of the world outside a compiled step, each made to two models alike: the table of `tests/runtime/test_assumptions.py`.

An act may return a context, inside which it holds.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from tests.support.batches import padded

transformers = pytest.importorskip("transformers")
ACTS = {}  #: by what is changed


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


@contextlib.contextmanager
def removed(handle):
    try:
        yield
    finally:
        handle.remove()


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


@act
def a_hook_of_all_modules(models):
    def louder(module, args, output):
        return output * 1.5 if isinstance(module, nn.Linear) else None

    return removed(torch.nn.modules.module.register_module_forward_hook(louder))


@act
def a_hook_on_a_modules_gradient(models):
    for m in models:
        m.model.layers[0].mlp.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))


@act
def a_hook_on_a_weights_gradient(models):
    for m in models:
        m.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient * 2)


@act
def a_parametrised_weight(models):
    class Half(nn.Module):
        def forward(self, weight):
            return weight * 0.5

    for m in models:
        torch.nn.utils.parametrize.register_parametrization(m.model.layers[0].self_attn.q_proj, "weight", Half())


@act
def a_pruned_weight(models):
    for m in models:
        prune.l1_unstructured(m.model.layers[1].mlp.down_proj, "weight", 0.5)


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
def a_buffer_by_another(models):
    for m in models:
        m.model.rotary_emb.inv_freq = m.model.rotary_emb.inv_freq * 0.5


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


@act
def the_attention_implementation(models):
    for m in models:
        m.set_attn_implementation("eager")


@act
def hidden_states_are_returned(models):
    for m in models:
        m.config.output_hidden_states = True


@act
def the_default_dtype(models):
    torch.set_default_dtype(torch.float64)
    stack = contextlib.ExitStack()
    stack.callback(torch.set_default_dtype, torch.float32)
    return stack


@act
def the_default_device(models):
    torch.set_default_device("cpu")
    stack = contextlib.ExitStack()
    stack.callback(torch.set_default_device, None)
    return stack


@act
def the_backend_of_attention(models):
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


@act
def a_mode_that_sees_all_operations(models):
    return torch.utils.flop_counter.FlopCounterMode(display=False)


@act
def a_search_for_anomalies(models):
    return torch.autograd.set_detect_anomaly(True)


@act
def a_forward_without_gradients(models):
    for no_gradients in (torch.no_grad, torch.inference_mode):
        with no_gradients():
            logits = [m(**padded(seed=3)).logits for m in models]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


#: rows that change no number
SAME = {
    *("deterministic algorithms", "the cache setting", "checkpointing", "another dtype", "a copied layer"),
    *("the attention implementation", "hidden states are returned", "the default dtype", "the default device"),
    *("the backend of attention", "a mode that sees all operations", "a search for anomalies"),
    "a forward without gradients",
}
