"""Why a batch keeps its padding: the arguments of the call, and hooks and modules that may look at hidden states.

Each function returns None where nothing was found.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from tunecompile._torch.distributed import several
from tunecompile._torch.modules import global_hooks, is_of
from tunecompile.integrations.fsdp import gathers_inside
from tunecompile.integrations.loss_caller import home_of, router_logits_are_masked
from tunecompile.integrations.transformers import gives_cache
from tunecompile.notes import Note, note
from tunecompile.runtime.watch.module_watch import ModuleSnapshot

_MIXERS = (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.batchnorm._BatchNorm, nn.MultiheadAttention)
#: of torch's own modules, the forwards that treat each token by itself
_TOKEN_WISE = {
    kind.forward
    for kind in (
        *(nn.Linear, nn.Embedding, nn.Identity, nn.Dropout, nn.AlphaDropout, nn.ModuleList),
        *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.Hardswish),
        *(nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign),
    )
}
#: of torch's modules, those that call another one, or make weights
_WRAPPERS = ("torch.distributed.", "torch.nn.parallel.", "torch.nn.utils.parametri", "torch.nn.modules.container")
ROUTER_LOGITS = "output_router_logits"
_HARMLESS = (
    *("tunecompile.", "transformers.utils.output_capturing", "torch.distributed.", "accelerate."),
    "bitsandbytes.nn.parametrize",
)
#: packages whose modules outside the layers treat each token by itself, and keep nothing; of torch's, see `_mixes`.
#: Others may read neighbouring tokens, or keep their inputs. (What layers do is read from their graphs, see
#: `compiler.token_wise`.)
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


def _heads(owner: nn.Module, model: nn.Module | None) -> Note | None:
    """Whether a head mixes tokens, or may."""
    for head in model.children() if model is not None and model is not owner else ():
        if any(module is owner for module in head.modules()):  # it is what the head comes after; found soon
            continue
        for module in head.modules():
            if (
                reason := note("head-mixes-tokens")
                if isinstance(module, _MIXERS)
                else _mixes(module) or _foreign(module)
            ):
                return reason
    return None


def _mixes(module: nn.Module) -> Note | None:
    """Whether a module of torch's, outside the layers, may read more than one token: an average over a batch, say."""
    forward = inspect.unwrap(type(module).forward)  # torch's decorators have its package as their home
    home = home_of(forward)
    if not home.startswith("torch.") or home.startswith(_WRAPPERS) or forward in _TOKEN_WISE:
        return None
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) == 1:
        return None
    return note("unknown-module", type(module).__name__, home=home)


def _outside(owner: nn.Module, layers: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Modules outside the layers, without convolutions in front of them, of speech, which see what they always saw."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    before = True
    for module in owner.modules():
        before &= id(module) not in inside
        if id(module) not in inside and not (before and isinstance(module, nn.modules.conv._ConvNd)):
            yield module


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


def arguments(given: dict[str, Any]) -> Note | None:
    """What the owner's forward is given."""
    for name in ("output_hidden_states", "output_attentions"):
        if given.get(name):
            return note("output-required", name)
    return note("cache-used") if given.get("use_cache") or gives_cache(given) else None


def weights(layers: Sequence[nn.Module]) -> Note | None:
    """Whether a call has weights of its own, which `torch.func.functional_call` gives it: repeated later, with its
    padding, it would have others. (It gives them to all layers, so that the first one is looked at.)
    """
    held = (value for layer in layers[:1] for module in layer.modules() for value in module._parameters.values())
    own = any(value is not None and not isinstance(value, nn.Parameter) for value in held)
    return note("weights-of-call") if own else None


def wants_router_logits(owner: nn.Module, given: dict[str, Any]) -> Note | None:
    """Whether router logits are requested: by an argument, or else by the config. Takes what `router_logits` does."""
    wanted = given.get(ROUTER_LOGITS)
    asked = getattr(getattr(owner, "config", None), ROUTER_LOGITS, False) if wanted is None else wanted
    return note("output-required", ROUTER_LOGITS) if asked else None


def router_logits(owner: nn.Module, given: dict[str, Any]) -> Note | None:
    """Whether somebody may read router logits of padding, which are zero there.

    Args:
        owner: of the layers.
        given: what its forward is given, by name.
    """
    mask = given.get("attention_mask")
    masked = isinstance(mask, Tensor) and mask.dim() == 2
    wanted = wants_router_logits(owner, given)
    return None if wanted is None or (masked and router_logits_are_masked()) else wanted


def gathers(owner: nn.Module) -> bool:
    """Whether weights of modules inside are gathered from other ranks while it runs: by FSDP, or ZeRO-3.

    All ranks have to call such modules equally often, so that no call of the owner may be made again by one of them.
    """
    if not several():
        return False
    parts = any(hasattr(p, name) for p in owner.parameters() for name in ("ds_id", "_fsdp_flattened"))
    return parts or gathers_inside(owner)


class OwnerWatch:
    """Hooks and modules of the user's own, which would see zeros at padding, or documents in one row: losses on hidden
    states, adapters by row, pooling. Looked at for every padded batch; modules are walked again only where one was
    added, removed or replaced, or where one outside the layers has another class. (Layers' own code is in graphs.)
    """

    def __init__(self, owner: nn.Module, members: Callable[[], Sequence[nn.Module]]):
        self.owner, self.members = owner, members
        self.snapshot: ModuleSnapshot | None = None
        self.mixed: Note | None = None  #: why a module of torch's outside the layers is in the way
        self.outside: list[tuple[weakref.ref[nn.Module], type]] = []  #: modules outside the layers, and their classes
        self.looked = False  #: whether modules were looked at in the owner's call that is under way
        self.inside: Note | None = None  #: what was found there

    def begin(self) -> None:
        """The owner is called: modules and hooks stay as they are until layers run."""
        self.looked = False

    def reason(self, model: nn.Module | None = None) -> Note | None:
        """Why hidden states have to stay as they are.

        model: whose loss is computed from labels; a head of it sees zeros at padding.
        """
        if not self.looked:
            self.inside, self.looked = self._look(), True
        return self.inside or _heads(self.owner, model)

    def _look(self) -> Note | None:
        """At the modules, which takes milliseconds where there are thousands."""
        if self.snapshot is None or self.snapshot.changed or any(type(m()) is not kind for m, kind in self.outside):
            self.snapshot = ModuleSnapshot(self.owner)
            modules, outside = list(self.owner.modules()), list(_outside(self.owner, self.members()))
            self.mixed = next(filter(None, map(_mixes, outside)), None)
            self.outside = [(weakref.ref(module), type(module)) for module in outside]
            self.kinds = {type(module) for module in modules}
            self.modules = [(weakref.ref(module), type(module), vars(module)) for module in modules]
        if self.mixed or any(global_hooks()[:2]):
            return self.mixed or note("hook-on-all-modules")
        unknown = {kind for kind in self.kinds if not _is_known(kind.forward)}
        hooked = self.snapshot.hooked
        for at, (module, kind, own) in enumerate(self.modules):
            if (at in hooked or "forward" in own or kind in unknown) and (reason := _foreign(module())):
                return reason
        return None
