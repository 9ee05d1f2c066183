"""Changes of the world outside a compiled step, each made to two models alike: the table of `tests/runtime/test_assumptions.py`.

An act may return a context, inside which it holds.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune

from tests.support.batches import padded

transformers = pytest.importorskip("transformers")
LLAMA = transformers.models.llama.modeling_llama
TABLE = type(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS)
ROTATE, MASK, SDPA, MLP, SILU = (
    *(LLAMA.apply_rotary_pos_emb, LLAMA.create_causal_mask, TABLE._global_mapping["sdpa"]),
    *(LLAMA.LlamaMLP.forward, F.silu),
)


@contextlib.contextmanager
def attribute(holder, name, value):
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextlib.contextmanager
def until(undo: Callable, *args):
    try:
        yield
    finally:
        undo(*args)


def world(make: Callable) -> Callable:
    """An act that changes no model."""
    return lambda models: make()


def each(change: Callable) -> Callable:
    """An act that changes each model by itself."""

    def act(models):
        for model in models:
            change(model)

    return act


def layer(change: Callable, place: int = 0) -> Callable:
    """An act that changes one layer of each model."""
    return each(lambda m: change(m.model.layers[place]))


def sharper(module, query, key, value, mask, scaling=None, **kwargs):
    return SDPA(module, query, key, value, mask, scaling=scaling * 2, **kwargs)


def forwards_of_instances(models):
    stack = contextlib.ExitStack()
    for m in models:
        mlp = m.model.layers[1].mlp
        mlp.forward = lambda x, mlp=mlp: MLP(mlp, x) * 0.5
        stack.callback(vars(mlp).pop, "forward")
    return stack


def a_layer_fewer(m):
    del m.model.layers[0]
    m.model.layers[0].self_attn.layer_idx = 0
    m.config.num_hidden_layers = 1


def another_head(models):
    torch.manual_seed(7)
    head = nn.Linear(64, 256, bias=True)
    for m in models:
        m.set_output_embeddings(copy.deepcopy(head))


class Half(nn.Module):
    def forward(self, weight):
        return weight * 0.5


def copied(layers):
    layers[1] = copy.deepcopy(layers[1])


def flip(weight):
    weight.data = weight.data.flip(0).contiguous()


def louder(module, args, output):
    return output * 1.5 if isinstance(module, nn.Linear) else None


def without_gradients(models):
    for no_gradients in (torch.no_grad, torch.inference_mode):
        with no_gradients():
            logits = [m(**padded(seed=3)).logits for m in models]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


def switched(switch: Callable, on: object, off: object) -> Callable:
    return lambda models: (switch(on), until(switch, off))[1]


#: acts by what is changed: functions that are looked up, modules and hooks, numbers, flags and weights
ACTS = {
    "a function of the models file": world(
        lambda: attribute(
            LLAMA, "apply_rotary_pos_emb", lambda q, k, cos, sin, *a, **o: ROTATE(q, k, cos, -sin, *a, **o)
        )
    ),
    "the mask function": world(
        lambda: attribute(
            LLAMA,
            "create_causal_mask",
            lambda *a, **o: MASK(*a, **o | {"and_mask_function": lambda b, h, q, k: q - k < 3}),
        )
    ),
    "attention in the table": world(
        lambda: attribute(TABLE, "_global_mapping", {**TABLE._global_mapping, "sdpa": sharper})
    ),
    "the forward of a class": world(lambda: attribute(LLAMA.LlamaMLP, "forward", lambda self, x: MLP(self, x) * 2)),
    "the forward of an instance": forwards_of_instances,
    "an activation": layer(lambda of: setattr(of.mlp, "act_fn", nn.GELU())),
    "a hook that changes a result": layer(lambda of: of.mlp.register_forward_hook(lambda mod, args, out: out * 1.5)),
    "a module in a layer": layer(lambda of: setattr(of, "mlp", nn.Sequential(of.mlp, nn.Tanh())), 1),
    "the order of layers": each(lambda m: setattr(m.model, "layers", nn.ModuleList(reversed(m.model.layers)))),
    "a layer fewer": each(a_layer_fewer),
    "a copied layer": each(lambda m: copied(m.model.layers)),
    "the head": another_head,
    "the final norm": each(lambda m: setattr(m.model, "norm", nn.Identity())),
    "a hook of all modules": world(lambda: until(nn.modules.module.register_module_forward_hook(louder).remove)),
    "a hook on a modules gradient": layer(
        lambda of: of.mlp.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    ),
    "a hook on a weights gradient": layer(
        lambda of: of.mlp.up_proj.weight.register_hook(lambda gradient: gradient * 2)
    ),
    "a parametrised weight": layer(
        lambda of: parametrize.register_parametrization(of.self_attn.q_proj, "weight", Half())
    ),
    "a pruned weight": layer(lambda of: prune.l1_unstructured(of.mlp.down_proj, "weight", 0.5), 1),
    "a number of a module": layer(lambda of: setattr(of.self_attn, "scaling", of.self_attn.scaling * 2)),
    "an epsilon": layer(lambda of: setattr(of.input_layernorm, "variance_epsilon", 0.1)),
    "weights in place": layer(torch.no_grad()(lambda of: of.mlp.up_proj.weight.mul_(2))),
    "a weight by another": layer(
        lambda of: setattr(of.mlp.up_proj, "weight", nn.Parameter(of.mlp.up_proj.weight.detach() * 2))
    ),
    "the data of a weight": layer(lambda of: flip(of.self_attn.q_proj.weight)),
    "a frozen layer": layer(lambda of: of.requires_grad_(False)),
    "frozen embeddings": each(lambda m: m.model.embed_tokens.requires_grad_(False)),
    "another dtype": each(lambda m: m.double()),
    "frequencies in a buffer": each(lambda m: m.model.rotary_emb.inv_freq.mul_(0.5)),
    "a buffer by another": each(lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq * 0.5)),
    "one weight for two layers": each(
        lambda m: setattr(m.model.layers[1].mlp.up_proj, "weight", m.model.layers[0].mlp.up_proj.weight)
    ),
    "a function of torch": world(lambda: attribute(F, "silu", lambda x, inplace=False: SILU(x) * 0.5)),
}
#: those that change no number
SAME = {
    "deterministic algorithms": switched(torch.use_deterministic_algorithms, True, False),
    "the cache setting": each(lambda m: setattr(m.config, "use_cache", False)),
    "checkpointing": each(lambda m: m.gradient_checkpointing_enable()),
    "the attention implementation": each(lambda m: m.set_attn_implementation("eager")),
    "hidden states are returned": each(lambda m: setattr(m.config, "output_hidden_states", True)),
    "the default dtype": switched(torch.set_default_dtype, torch.float64, torch.float32),
    "the default device": switched(torch.set_default_device, "cpu", None),
    "the backend of attention": world(lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH)),
    "a mode that sees all operations": world(lambda: torch.utils.flop_counter.FlopCounterMode(display=False)),
    "a search for anomalies": world(lambda: torch.autograd.set_detect_anomaly(True)),
    "a forward without gradients": without_gradients,
    **{name: ACTS.pop(name) for name in ("another dtype", "a copied layer")},
}
