"""Small models beside themselves: one optimized, one as it was, with the same weights."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable

from torch import nn

import tunecompile
from tests.support import zoo


def small(family: str = "llama", **changes) -> nn.Module:
    return zoo.make(family, **{"num_hidden_layers": 2, **changes})


class Plain(nn.Module):
    """A layer without attention, which is traced several times as fast."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, hidden_states, **_):
        return hidden_states + self.inner(hidden_states).sin()


class TokenWise(Plain):
    """The same as a layer of transformers would have it: its padding is removed, which a user's code keeps."""

    forward = types.FunctionType(Plain.forward.__code__, {**globals(), "__name__": "transformers.models"})


def of_plain_layers(kind: type[Plain] = Plain, **changes) -> nn.Module:
    """A model of transformers for tests of its head and its loss, which say nothing of layers."""
    model = small(**changes)
    for place in range(len(model.model.layers)):
        model.model.layers[place] = kind(model.config.hidden_size)
    return model


def token_wise(**changes) -> nn.Module:
    """A model for tests of padding and prefixes, which say nothing of attention."""
    return of_plain_layers(TokenWise, **changes)


def adapted_layers(**options) -> nn.Module:
    """The same with LoRA: for tests of trainers and loops, and of padding where nothing is said of attention."""
    return zoo.adapt(token_wise(), target_modules=["inner"], **options)


#: of layers, what treats each token by itself
BY_TOKEN = {"mlp", "input_layernorm", "post_attention_layernorm", "feed_forward", "operator_norm", "ffn_norm"}
BY_TOKEN |= {"attn_norm", "mlp_norm"}


def without_mlps(model: nn.Module) -> nn.Module:
    """The model, whose layers mix tokens and do nothing else: for tests of padding and masks."""
    for layer in getattr(model, "model", model).layers:
        for name in BY_TOKEN & {*layer._modules}:
            setattr(layer, name, nn.Identity())
    return model


def attending(**changes) -> nn.Module:
    return without_mlps(small(**changes))


def pair(build: Callable[[], nn.Module] = attending, **options) -> tuple[nn.Module, nn.Module]:
    """(optimized with these options, as it was), with the same weights."""
    reference = build().train()
    return optimized(copy.deepcopy(reference), **options), reference


def optimized(model: nn.Module, **options) -> nn.Module:
    """Operations one by one: code is generated in few tests, since it takes long on a CPU."""
    return tunecompile.optimize(model, **{"executor": "eager", **options})


def compiled_slots(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if module._compiled_call_impl is not None]


def checkpoint(model: nn.Module, **kwargs) -> None:
    """Switch checkpointing on, as the installed transformers calls it."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
