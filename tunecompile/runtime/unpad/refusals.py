"""Why a batch keeps its padding: the model's structure, its hooks and modules, the arguments of the call.

Each function returns None where nothing was found.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tunecompile._torch.modules import global_hooks, is_of
from tunecompile.integrations.loss_caller import home_of
from tunecompile.notes import Note, note

BOUNDARIES = {
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
}  #: what collators say to other attention; ours follows positions
_MIXERS = (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.batchnorm._BatchNorm, nn.MultiheadAttention)


def structure(owner: nn.Module, layers: tuple[nn.Module, ...], parameters: tuple) -> Note | None:
    """Why no batch of this model can be flattened, as far as its structure tells; None where none is found."""
    transformers, config = sys.modules.get("transformers"), getattr(owner, "config", None)
    interface = getattr(transformers, "AttentionInterface", None)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if (
        interface is None
        or not hasattr(config, "_attn_implementation_internal")
        or not getattr(owner, "_supports_attention_backend", False)
    ):
        return note("no-attention-interface")
    if not getattr(owner, "_supports_flash_attn", False):  # what is said by a mask alone would be lost
        return note("needs-mask")
    if not open_ended or not {"attention_mask", "position_ids"} <= {p.name for p in parameters}:
        return note("drops-keywords")
    if getattr(owner, "_is_stateful", False) or any(
        isinstance(m, _MIXERS) for layer in layers for m in layer.modules()
    ):
        return note("mixes-tokens")
    if not set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}:
        return note("mixes-tokens")
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None):
        return note("not-causal")
    if _embeds_more(owner):
        return note("embeds-more")
    if _follows_length(config.to_dict()):
        return note("rope-follows-length")
    return None


def _embeds_more(owner: nn.Module) -> bool:
    """Whether there is an embedding beside that of tokens. An adapter that trains a copy keeps both in one module."""
    tables = [module for module in owner.modules() if isinstance(module, nn.Embedding)]
    if len(tables) < 2:
        return False
    try:
        inside = set(owner.get_input_embeddings().modules())
    except (AttributeError, NotImplementedError):
        return True
    return not inside.issuperset(tables) or len({table.weight.shape for table in tables}) > 1


def _follows_length(settings: Any) -> bool:
    if not isinstance(settings, dict):
        return False
    return any(
        (key in ("rope_type", "type") and value in ("dynamic", "longrope")) or _follows_length(value)
        for key, value in settings.items()
    )


_HARMLESS = ("tunecompile.", "transformers.utils.output_capturing", "torch.distributed.", "accelerate.")
#: packages whose modules are known to `structure`, or treat each token by itself. Others may read neighbouring tokens,
#: or keep their inputs
_KNOWN_HOMES = (
    "torch.",
    "transformers.",
    "peft.",
    "bitsandbytes.",
    "accelerate.",
    "deepspeed.",
    "liger_kernel.",
    "trl.",
    "torchao.",
    "hqq.",
    "gptqmodel.",
    "tunecompile.",
)


def watched(owner: nn.Module, model: nn.Module | None = None) -> Note | None:
    """Hooks and modules of the user's own would see [1, N] in place of [B, T]: noise on embeddings, losses on hidden
    states, adapters by row, pooling.

    model: whose loss is computed from labels; a head of it sees zeros at padding."""
    if any(global_hooks()[:2]):
        return note("hook-on-all-modules")
    for module in owner.modules():
        if reason := _foreign(module):
            return reason
    for head in model.children() if model is not None and model is not owner else ():
        if any(module is owner for module in head.modules()):  # it is what the head comes after; found soon
            continue
        for module in head.modules():
            if reason := note("head-mixes-tokens") if isinstance(module, _MIXERS) else _foreign(module):
                return reason
    return None


def _foreign(module: nn.Module) -> Note | None:
    """Whether a module may see more than one token, or keep its inputs, judged by its package and its hooks."""
    own = vars(module).get("forward")
    if not (_is_known(type(module).forward) and (own is None or home_of(own).startswith(_KNOWN_HOMES))):
        home = home_of(own or type(module).forward) or "another package"
        return note("unknown-module", type(module).__name__, home=home)
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        known = (
            getattr(hook, "__name__", "") == "make_inputs_require_grads"
        )  # of transformers' enable_input_require_grads
        if not known and not is_of(hook, _HARMLESS):
            return note("hook-on-module", type(module).__name__)
    return None


@functools.lru_cache(maxsize=1024)
def _is_known(forward: Callable) -> bool:
    """Of a class: there are few, and thousands of modules are asked at every step."""
    return home_of(forward).startswith(_KNOWN_HOMES)


_KNOWN = {"input_ids", "inputs_embeds", "attention_mask", "position_ids"}


def call(given: dict, mask: Tensor, tokens: Tensor | None, labels: Tensor) -> Note | None:
    """Why this batch cannot be flattened, as far as its arguments tell."""
    if (
        tokens is None
        or tokens.shape[:2] != mask.shape
        or (given.get("position_ids") is not None and given["position_ids"].dim() != 2)
    ):
        return note("shapes-differ")
    return note("labels-shape") if labels.shape != mask.shape else arguments(given)


def arguments(given: dict) -> Note | None:
    """What the owner's forward is given beside tokens, mask and positions."""
    for name, value in given.items():
        if name in ("output_hidden_states", "output_attentions", "output_router_logits") and value:
            return note("output-required", name)
        if (
            name in _KNOWN
            or name in BOUNDARIES
            or value is None
            or isinstance(value, (bool, int, float, str))
            or (isinstance(value, Tensor) and not value.dim())
        ):
            continue
        return note("argument-given", name)
    return note("cache-used") if given.get("use_cache") else None
