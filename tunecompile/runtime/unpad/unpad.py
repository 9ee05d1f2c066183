"""Padded batches reach the layers without their padding: [B, T] tokens become [1, N] real ones, and the last hidden states [B, T, H] again.
Packed ones, whose positions begin anew inside a row, do so without the mask that would keep their sequences apart.

Only what runs between the module that owns the layers and its output changes, so head, loss and trainer see the shapes they know.
Attention learns where a row begins from `offsets`, through the attention interface of transformers: a function under a name of our
own, without a mask function, so that no mask is made. The models' configs carry that name during the flattened call only.

What the padded run computes at padding is given up: hidden states there are zero. So a batch is flattened only where the labels of
a forward whose loss is known tell that no loss reads them. In all other cases the padded run stays, and the report says why.
A packed batch has no padding, and gives up nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunecompile._torch.autograd import in_backward, in_checkpoint, others_trace
from tunecompile._torch.modules import call_original
from tunecompile.integrations import context_parallel, loss_caller
from tunecompile.integrations.varlen_attention import INTERFACE, NO_KERNEL, CannotFlatten, attention
from tunecompile.ir.op import HALF
from tunecompile.runtime.unpad import packed_masks, refusals
from tunecompile.runtime.unpad.flat_batch import FlatBatch

log = logging.getLogger(__name__)

IGNORED = -100
TOGETHER = "transformers lets their sequences see each other, as it does where a cache is made (model.config.use_cache = False makes none)"
PADDED, PACKED = "padded batches are not flattened", "packed batches stay as they come"
UNPADDED = 8  #: so many batches are looked at to say why a padded one would not be flattened


class Unpadding:
    """Decides for each batch of one owner of layers, and keeps why padded ones were not flattened."""

    def __init__(
        self,
        owner: nn.Module,
        layers: tuple[nn.Module, ...],
        step: Any,
        head_is_called: Callable[[], bool] = lambda: True,
    ):
        self.owner, self.layers, self.step = owner, layers, step
        self.head_is_called = head_is_called  #: by any training step
        self.apart: dict[
            tuple, bool
        ] = {}  #: whether packed sequences do not see each other, by how the model is called
        self.notes: dict[str, None] = {}
        self.looks = UNPADDED
        self.flattened = self.packed = 0
        self.parameters = tuple(inspect.signature(owner.forward).parameters.values())
        self.refused = refusals.structure(owner, layers, self.parameters)
        if not self.refused:
            sys.modules["transformers"].AttentionInterface.register(INTERFACE, attention)
        found = [vars(module).get("config") for module in owner.modules()]
        self.configs = list({id(c): c for c in found if hasattr(c, "_attn_implementation_internal")}.values())
        self.shared = False  #: whether attention ever ran outside of what is compiled, see `context`
        self.flat = False  #: whether the last call gave up what stands at padding

    def call(self, args: tuple, kwargs: dict) -> Any:
        """The owner's call, flattened where that changes no gradient."""
        given = {**{p.name: value for p, value in zip(self.parameters, args)}, **kwargs}
        flat = self.decide(given)
        self.flat = flat is not None and flat.gives_up
        if flat is None:
            return self._as_it_comes(given, args, kwargs)
        output = self._without_padding(flat, given, args, kwargs)
        if not self.refused:
            self.flattened += flat.gives_up
            self.packed += not flat.gives_up
        return output

    def score(self, args: tuple, kwargs: dict) -> Any:
        """The owner's call without gradients, flattened as training steps are: a reference that rounds otherwise would be read as a change of the policy.
        What stands at padding is given up where nobody gets it: where no step has called the head, so that the caller takes labelled rows by himself."""
        given = {**{p.name: value for p, value in zip(self.parameters, args)}, **kwargs}
        asks = scores(self.owner, any(p.name == "use_cache" for p in self.parameters), args, kwargs) and (
            self.packed
            if given.get("attention_mask") is None
            else self.flattened and not self.head_is_called() and loss_caller.causal_labels()[0] is not None
        )
        flat = self.decide(given) if asks else None
        self.flat = flat is not None and flat.gives_up
        return (
            call_original(self.owner, *args, **kwargs)
            if flat is None
            else self._without_padding(flat, given, args, kwargs)
        )

    def _without_padding(self, flat: FlatBatch, given: dict, args: tuple, kwargs: dict) -> Any:
        try:
            with self.attention():
                return flat.outputs(call_original(self.owner, **flat.inputs(given)))
        except CannotFlatten as reason:
            self.refuse(str(reason), PADDED if flat.gives_up else PACKED)
            return call_original(self.owner, *args, **kwargs)

    def refuse(self, reason: str, batches: str = PADDED) -> None:
        """From now on every batch runs as it comes."""
        self.refused, self.flat = reason, False
        self._note(reason, batches)

    def logits_are_read(self) -> None:
        """Somebody beside the loss, or a loss with other labels, reads logits of a flattened call: what stands at padding may matter to them."""
        if self.flattened and not self.refused:
            self.refuse(
                "logits are read beside the loss, at padding perhaps (they were zero hidden states' in the first such step)"
            )
            log.warning("tunecompile: %s", next(reversed(self.notes)))

    def _note(self, reason: str, batches: str = PADDED) -> None:
        self.notes[f"{batches}: {reason}"] = None

    @contextlib.contextmanager
    def attention(self, interface: str = INTERFACE) -> Iterator[None]:
        """Layers call our attention function, and no mask is made."""
        before = [(config, config._attn_implementation_internal) for config in self.configs]
        for config, _ in before:
            config._attn_implementation_internal = interface
        try:
            yield
        finally:
            for config, name in before:  # another model may share the config, and be under way
                config._attn_implementation_internal = "sdpa" if name == interface else name

    def decide(self, given: dict) -> FlatBatch | None:
        """The batch without its padding, or None where it has none or must keep it."""
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        if in_backward():  # a checkpoint's recomputation: its forward was padded, see `_changed`
            return None
        tokens = packed_masks.tokens_of(given)
        if mask is None and isinstance(tokens, Tensor) and isinstance(positions, Tensor):
            return self._decide_packed(given, tokens, positions)
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return None
        labels, unknown, model = loss_caller.causal_labels()
        reason = self.refused or self._changed() or unknown or refusals.call(given, mask, tokens, labels)
        if reason:
            self._look(mask, reason)
            return None
        real = (mask != 0).to(tokens.device)
        padding, labelled = ~real, F.pad(labels.to(real.device) != IGNORED, (0, 1))
        read = (padding & (labelled[:, :-1] | labelled[:, 1:])).sum()  # by a loss that shifts, or by one that does not
        runs = (real & F.pad(padding, (1, 0), value=True)[:, :-1]).sum(1).amax()
        count, read, runs = torch.stack([real.sum(), read, runs]).tolist()  # the one host read of the step
        if count == real.numel() or not count:
            return None
        kept = (
            "labels stand at padding, and count in the loss"
            if read
            else "a row is not in one piece"
            if runs > 1
            else refusals.watched(self.owner, model)
        )
        if kept:
            self._note(kept)
            return None
        return FlatBatch.of(real, count)

    def _decide_packed(self, given: dict, tokens: Tensor, positions: Tensor) -> FlatBatch | None:
        """The batch with its sequences told apart, where a mask would do so."""
        if positions.dim() != 2 or positions.shape[0] not in (1, len(tokens)) or positions.shape[1] != tokens.shape[1]:
            return None
        starts, apart = packed_masks.beginnings(positions, tokens.shape[:2]), self._keeps_apart(given, tokens)
        reason = (
            TOGETHER
            if apart is False
            else "its masks are not understood"
            if apart is None
            else self.refused or self._changed() or refusals.arguments(given) or refusals.watched(self.owner)
        )
        if reason:
            self._look(~starts[:, 1:], reason, PACKED)
            return None
        starts = starts.cpu()  # the one host read of the step
        return FlatBatch.packed(starts, tokens.device) if int(starts.sum()) > len(starts) else None

    def _keeps_apart(self, given: dict, tokens: Tensor) -> bool | None:
        """Asked once for each way in which the model can be called."""
        way = (
            given.get("use_cache"),
            getattr(self.owner.config, "use_cache", None),
            getattr(self.owner, "gradient_checkpointing", None),
        )
        if way not in self.apart:
            self.apart[way] = packed_masks.keeps_apart(self.owner, self.layers, given, tokens)
        return self.apart[way]

    def _as_it_comes(self, given: dict, args: tuple, kwargs: dict) -> Any:
        """Without a cache, see `EntryHook`, sequences would no longer see each other: a mask keeps it so."""
        tokens = packed_masks.tokens_of(given)
        if (
            given.get("attention_mask") is None
            and given.get("position_ids") is not None
            and tokens is not None
            and self._keeps_apart(given, tokens) is False
        ):
            return call_original(self.owner, **packed_masks.seeing_all(given, tokens))
        return call_original(self.owner, *args, **kwargs)

    def _look(self, plain: Tensor, reason: str, batches: str = PADDED) -> None:
        """Note the reason if there is padding, or packing, at all: a host read, so only for the first batches."""
        if self.looks:
            self.looks -= 1
            if not bool(plain.all()):
                self._note(reason, batches)

    def _changed(self) -> str:
        """What the user may set at any time."""
        config = self.owner.config
        if (device := next(self.owner.parameters()).device).type == "cuda":
            if torch.cuda.get_device_capability(device) < (8, 0):
                return "this GPU has no kernel for attention without padding"
            if self.owner.dtype not in HALF and not torch.is_autocast_enabled(
                "cuda"
            ):  # told here, before layers are compiled in vain
                return NO_KERNEL
        if (name := config._attn_implementation_internal) != "sdpa":
            return f"the attention implementation is {name}, and stays so"
        for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
            if getattr(config, name, False):
                return f"{name} is asked for"
        if context_parallel.is_shared():
            return "context_parallel gives each process a part of every sequence"
        return "a checkpoint is around all layers, and would have to repeat the decision" if in_checkpoint() else ""

    def report(self) -> list[str]:
        said = [f"padding is left out of the layers ({self.flattened} batches)"] if self.flattened else []
        said += [f"packed sequences are told apart without a mask ({self.packed} batches)"] if self.packed else []
        return said + [context_parallel.OUTSIDE] * self.shared + list(self.notes)


def scores(owner: nn.Module, takes_cache: bool, args: tuple, kwargs: dict) -> bool:
    """Whether log-probabilities are computed to be compared with those of training steps (a reference model in DPO, the old policy in GRPO): the same
    code has to compute them, or its rounding becomes part of the loss. Generation is told by its cache."""
    if not owner.training or torch.is_grad_enabled() or torch.is_inference_mode_enabled() or others_trace():
        return False
    if not takes_cache:
        return True
    asked = kwargs.get("use_cache")
    caches = getattr(getattr(owner, "config", None), "use_cache", True) if asked is None else asked
    return not caches and kwargs.get("past_key_values") is None and len(args) < 3


class OwnerSlot:
    """What stands in the owner's `_compiled_call_impl`: in a training step the batch is flattened, if it may be."""

    def __init__(self, padding: Unpadding):
        self.padding = padding

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self.padding.owner
        if not owner.training or others_trace():
            return call_original(owner, *args, **kwargs)
        if not torch.is_grad_enabled():
            return self.padding.score(args, kwargs)
        recovery = self.padding.step.recovery
        if recovery is None:
            return self.padding.call(args, kwargs)
        return recovery.attempt(lambda: self.padding.call(args, kwargs), restarts=True)
