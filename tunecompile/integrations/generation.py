"""transformers' `generate`: the decoding method that it takes from outside, its caches, scores and criteria."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.distributed import several
from tunecompile._torch.modules import global_hooks, is_of
from tunecompile.integrations.transformers import CACHES, KEPT, holds_tokens, is_cache
from tunecompile.notes import Note, note

#: processors of scores that read nothing but scores, and that a recording may hold
_OF_SCORES = {
    "EpsilonLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}
#: arguments of `generate` that its own decoding methods alone know
_OF_ITS_OWN = ("assistant_model", "custom_generate", "streamer", "tokenizer", "use_model_defaults")
_LIKE_TOKENS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")  #: one value a token, which stays


_ACT = ("drop", "jitter", "noise")  #: in names of numbers that modules read in training mode
#: packages whose functions, as hooks, do nothing beside what they launch
_OF_PACKAGES = ("torch.", "transformers.", "peft.", "trl.", "accelerate.", "bitsandbytes.")
#: methods of models that a decoding method calls
_METHODS = ("_prefill", "_update_model_kwargs_for_generation")


def generates(model: nn.Module) -> bool:
    """Whether a model has a `generate` that takes a decoding method, and all that this needs."""
    generate = getattr(type(model), "generate", None)
    if not callable(generate) or not all(hasattr(model, name) for name in _METHODS):
        return False
    return "custom_generate" in inspect.signature(generate).parameters


def why_not_given(model: Any, kwargs: dict[str, Any]) -> Note | None:
    """Why a call of `generate` is not handed a decoding method."""
    own = [name for name in _OF_ITS_OWN if kwargs.get(name) is not None]
    own += ["synced_gpus"] if kwargs.get("synced_gpus") else []  # trainers say that there is nothing to wait for
    if own:
        return note("generation-argument", own[0])
    if several() and any(hasattr(weight, name) for weight in model.parameters() for name in ("ds_id", "device_mesh")):
        return note("generation-sharded")
    config = copy.deepcopy(model.generation_config)
    given = kwargs.get("generation_config")
    for values in ({} if given is None else given.to_dict(), kwargs):
        config.update(**{name: value for name, value in values.items() if value is not None and hasattr(config, name)})
    mode = config.get_generation_mode()
    return None if mode in ("greedy_search", "sample") else note("generation-mode", mode.value)


def why_left(model: Any, config: Any, kwargs: dict[str, Any], longest: int) -> Note | None:
    """Why transformers' own loop generates, once `generate` has prepared everything.

    Args:
        model: whose `generate` was called.
        config: as `generate` prepared it.
        kwargs: for the model.
        longest: tokens that a row may have.
    """
    return _why_of_model(model, longest) or _why_of_arguments(model, config, kwargs) or _why_of_cache(config, kwargs)


def _why_of_model(model: Any, longest: int) -> Note | None:
    if model.config.is_encoder_decoder:
        return note("generation-encoder")
    if model.training and (acts := _acts_in_training(model)):
        return note("generation-in-training", acts)
    if not getattr(model, "_can_compile_fullgraph", False):  # GPT-Neo's masks, for one, read the length of the cache
        return note("generation-not-static", type(model).__name__)
    if len({weight.device for weight in model.parameters()}) > 1:
        return note("generation-devices")
    return _own_steps(model, longest) or _hooked(model)


def _acts_in_training(model: nn.Module) -> str:
    """What depends on a model's training mode: "" if nothing does. (TRL's GRPO generates in training mode.)"""
    for module in model.modules():
        if hasattr(module, "track_running_stats"):  # of batches
            return type(module).__name__
        if vars(module).get("gradient_checkpointing"):  # which drops the cache
            return "gradient_checkpointing"
        if "Dropout" in type(module).__name__ and getattr(module, "p", 0) > 0:
            return "dropout"
        for name, value in vars(module).items():
            if isinstance(value, float) and value > 0 and any(word in name for word in _ACT):
                return name
    return ""


def _why_of_arguments(model: Any, config: Any, kwargs: dict[str, Any]) -> Note | None:
    given = {
        "output_attentions": config.output_attentions,
        "output_hidden_states": config.output_hidden_states,
        # leaves padding out by numbers of the host
        "attn_implementation": "flash" in str(getattr(model.config, "_attn_implementation", "")),
        "prefill_chunk_size": config.prefill_chunk_size is not None,
        "is_assistant": config.is_assistant,  # its cache is cropped, and another model's tokens come into it
        "inputs_embeds": kwargs.get("inputs_embeds") is not None,  # tokens, and so lengths, are counted from behind
    }
    name = next((name for name, value in given.items() if value), None)
    return None if name is None else note("generation-argument", name)


def _why_of_cache(config: Any, kwargs: dict[str, Any]) -> Note | None:
    cache = kwargs.get(cache_name(kwargs))
    if not kwargs.get("use_cache") or type(cache).__name__ != "DynamicCache":
        return note("generation-cache", type(cache).__name__)
    if config.cache_implementation not in (None, "dynamic"):  # one that the host holds is of the same class
        return note("generation-cache", config.cache_implementation)
    if getattr(cache, "_is_user_defined", False) or holds_tokens(cache):
        return note("generation-cache", "the caller's")
    return None


def _own_steps(model: Any, longest: int) -> Note | None:
    """Whether a model, or who replaced its methods, knows of a number that changes from token to token."""
    from transformers import GenerationMixin

    prepare = "prepare_inputs_for_generation"
    own = {name: getattr(GenerationMixin, name) for name in ("_sample", "_update_model_kwargs_for_generation")}
    for name, function in {prepare: getattr(type(model), prepare), **own}.items():
        if getattr(getattr(model, name), "__func__", None) is not function:
            return note("generation-own-steps", name)
    # Phi-3 and its kin compute the whole row anew where their positions begin to be scaled by other factors
    bound = getattr(model.config, "original_max_position_embeddings", None)
    if getattr(type(model), prepare) is not getattr(GenerationMixin, prepare) and bound and longest > bound:
        return note("generation-own-steps", prepare)
    return None


def _hooked(model: nn.Module) -> Note | None:
    """Whether somebody's hook is on a module: a replay does not call it."""
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not _launches(hook):
                return note("generation-hooked", type(module).__name__)
    hooks = (hook for hooks in global_hooks() for hook in hooks.values())
    return None if all(map(_launches, hooks)) else note("generation-hooked", "all modules")


def _launches(hook: Callable) -> bool:
    """Whether all that a hook does is what it launches. (PEFT hands rows' adapters to its layers by partial ones.)"""
    return is_of(hook, ("tunecompile.",)) or (isinstance(hook, types.FunctionType) and is_of(hook, _OF_PACKAGES))


def own_method(model: Any, config: Any) -> Callable:
    """The decoding method of transformers for a configuration."""
    from transformers.generation.utils import GENERATION_MODES_MAPPING

    return getattr(type(model), GENERATION_MODES_MAPPING[config.get_generation_mode()])


def cache_name(kwargs: dict[str, Any]) -> str:
    """What the model calls its cache among these arguments."""
    return next((name for name in CACHES if kwargs.get(name) is not None), CACHES[0])


def by_rows(kwargs: dict[str, Any]) -> bool:
    """Whether it is known which of a prompt's arguments have values of single rows."""
    plain = (bool, int, float, str)
    return all(
        name in ("attention_mask", "position_ids") or is_cache(value) or value is None or isinstance(value, plain)
        for name, value in kwargs.items()
    )


def rows_of(kwargs: dict[str, Any], rows: Tensor, begin: int = 0) -> dict[str, Any]:
    """These arguments for some rows, from a column on. rows: int64, their numbers."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    made = {} if mask is None else {"attention_mask": mask[rows, begin:]}
    # [rows, T], or with a dimension of images' axes in front; one row may be for all
    if positions is not None:
        positions = positions[..., begin:]
        made["position_ids"] = positions.index_select(-2, rows) if positions.shape[-2] > 1 else positions
    return made


def split_criteria(criteria: Iterable[Any]) -> tuple[Tensor | None, list[Any]]:
    """The tokens that end a row, and the criteria that are neither these nor the maximum length."""
    ends = [each.eos_token_id for each in criteria if type(each).__name__ == "EosTokenCriteria"]
    others = [each for each in criteria if type(each).__name__ not in ("EosTokenCriteria", "MaxLengthCriteria")]
    return (torch.cat([each.flatten() for each in ends]) if ends else None), others


def recordable(processor: Any) -> bool:
    """Whether a processor of scores reads nothing but them, without a question to the host."""
    kind = type(processor)
    return kind.__module__ == "transformers.generation.logits_process" and kind.__name__ in _OF_SCORES


def shortest(processor: Any) -> tuple[int, Tensor] | None:
    """How many tokens a row has at least, prompt included, and the tokens that end none before, if it says so."""
    name = type(processor).__name__
    if name == "MinLengthLogitsProcessor":
        return processor.min_length, processor.eos_token_id
    if name == "MinNewTokensLengthLogitsProcessor":
        return processor.prompt_length_to_skip + processor.min_new_tokens, processor.eos_token_id
    return None


def fixed_inputs(kwargs: dict[str, Any], length: int) -> tuple[dict[str, Any], Tensor | None, Tensor | None]:
    """The arguments of one step, in memory that stays: those of all later steps, once the mask and the positions move.

    Args:
        kwargs: of the first step after the prompt.
        length: columns of the mask: of the cache.

    Returns:
        All arguments; the mask among them, [rows, length], and the positions, [..., rows, 1], where there are any.
    """
    made = dict(kwargs)
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None:
        made["attention_mask"] = torch.nn.functional.pad(mask, (0, length - mask.shape[1]))
    if positions is not None:
        made["position_ids"] = positions[..., -1:].clone()
    for name in _LIKE_TOKENS:
        if kwargs.get(name) is not None:
            made[name] = kwargs[name][..., -1:].clone()
    return made, made.get("attention_mask"), made.get("position_ids")


def can_be_returned(cache: Any) -> bool:
    """Whether a cache in fixed memory can be given to the caller as the growing one that transformers returns."""
    return all(type(layer).__name__ == "StaticLayer" for layer in cache.layers)


def output_of(model: Any, sequences: Tensor, scores: tuple | None, logits: tuple | None, cache: Any) -> Any:
    """What `generate` returns under `return_dict_in_generate`. The cache has all tokens but the last."""
    from transformers import DynamicCache
    from transformers.generation import GenerateDecoderOnlyOutput

    grown = DynamicCache(config=model.config.get_text_config(decoder=True))
    rows, tokens = len(sequences), sequences.shape[1] - 1
    for index, layer in enumerate(cache.layers):
        grown.update(layer.keys[:rows, :, :tokens], layer.values[:rows, :, :tokens], index)
    name = next(name for name in CACHES if name in inspect.signature(GenerateDecoderOnlyOutput).parameters)
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, **{name: grown})


class IndexRead(TypeError):
    """A layer's code depends on its number, and so cannot serve another layer."""


class _Unread:
    """What stands in `layer_idx` while a layer is compiled for all layers: it can be handed on, and not be read."""

    def _refuse(self, *_: object) -> Any:
        raise IndexRead("a layer's code depends on its number")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __index__ = __int__ = __float__ = __bool__ = (
        _refuse
    )
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __floordiv__ = _refuse


_UNREAD = _Unread()


@functools.cache
def _class_of_one_layer() -> type:
    """A cache whose methods have one layer's part, whichever index they are given."""
    from transformers.cache_utils import Cache

    def method(own: Callable, at: int) -> Callable:
        def of_the_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
            if "layer_idx" in kwargs:
                return own(self, *args, **{**kwargs, "layer_idx": 0})
            return own(self, *args[:at], 0, *args[at + 1 :], **kwargs)

        return of_the_layer

    methods = {}
    for name, own in vars(Cache).items():
        names = list(inspect.signature(own).parameters) if inspect.isfunction(own) and name[0] != "_" else []
        if "layer_idx" in names:
            methods[name] = method(own, names.index("layer_idx") - 1)
    return type("OneLayer", (Cache,), methods)


class LayerParts:
    """A cache, one layer's part after the other, and the layers whose parts they are: no part knows its number.

    Code that is compiled for one layer so serves all. A layer whose code does read its number cannot be compiled.
    """

    def __init__(self, cache: Any):
        self.cache = cache
        self.parts = [_class_of_one_layer()(layers=[layer]) for layer in cache.layers]
        self.owners: dict[int, list[dict[str, Any]]] = {}  #: id of a layer -> of its modules that have the index

    def of(self, layer: nn.Module) -> int | None:
        """The number of a layer's part; None where it has none."""
        held = self.owners.get(id(layer))
        if held is None:
            held = [vars(module) for module in layer.modules() if isinstance(vars(module).get("layer_idx"), int)]
            self.owners[id(layer)] = held
        numbers = {each["layer_idx"] for each in held}
        return numbers.pop() if len(numbers) == 1 and max(numbers) < len(self.parts) else None

    @contextlib.contextmanager
    def alone(self, layer: nn.Module, number: int) -> Iterator[None]:
        """Inside, no module of the layer knows its number."""
        held = self.owners[id(layer)]
        try:
            for each in held:
                each["layer_idx"] = _UNREAD
            yield
        finally:
            for each in held:
                each["layer_idx"] = number

    def tokens(self, number: int) -> Iterator[Tensor]:
        """Keys and values of a layer's part, [rows, heads, length, width]; none of a recurrence."""
        held = vars(self.cache.layers[number])
        yield from (held[name] for name in KEPT if isinstance(held.get(name), Tensor))

    def tensors(self, number: int) -> Iterator[Tensor]:
        """The memory of a layer's part."""
        for value in vars(self.cache.layers[number]).values():
            held = value.values() if isinstance(value, dict) else [value]
            yield from (each for each in held if isinstance(each, Tensor))
