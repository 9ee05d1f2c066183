"""Whether a batch reaches the layers without its padding: one value, decided at the entry of the module that owns the
layers.

The padded run computes hidden states at padding; without padding they are zero. So padding is removed only where the
labels of a forward whose loss is known show that no loss reads them. In all other cases the batch keeps its padding,
and the report says why. A packed batch has no padding, and nothing is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunecompile._torch.autograd import in_backward, in_checkpoint
from tunecompile.integrations import context_parallel, loss_caller
from tunecompile.ir.op import HALF
from tunecompile.notes import Note, note
from tunecompile.runtime.unpad import packed_masks, refusals
from tunecompile.runtime.unpad.flat_batch import FlatBatch

IGNORED = -100
PADDED, PACKED = "padding-kept", "packing-kept"  #: codes of notes


@dataclass(frozen=True)
class UnpadDecision:
    """What happens to one batch."""

    flat: FlatBatch | None = None  #: the batch without its padding
    reason: Note | None = None  #: why it keeps its padding, or stays packed under a mask
    batches: str = PADDED  #: the code of the note that has the reason
    plain: Tensor | None = (
        None  #: bool: where all of it holds there is no padding, or packing, and the reason does not matter
    )

    @property
    def drops(self) -> bool:
        """Whether hidden states at padding are not computed."""
        return self.flat is not None and self.flat.gives_up


AS_IT_COMES = UnpadDecision()


class UnpadPolicy:
    """Decides for the batches of one owner of layers."""

    def __init__(self, owner: nn.Module, layers: tuple[nn.Module, ...]):
        self.owner, self.layers = owner, layers
        #: whether packed sequences see nothing of each other, by the way in which the model is called
        self.apart: dict[tuple, bool | None] = {}

    def decide(self, given: dict[str, Any], refused: Note | None) -> UnpadDecision:
        """For a batch.

        Args:
            given: the arguments of the owner's forward, by name.
            refused: why no batch of this model may be flattened; None where none is known.
        """
        mask, positions, tokens = given.get("attention_mask"), given.get("position_ids"), packed_masks.tokens_of(given)
        if in_backward():  # a checkpoint's recomputation: its forward was padded, see `_now`
            return AS_IT_COMES
        if mask is None and isinstance(tokens, Tensor) and isinstance(positions, Tensor):
            return self._packed(given, tokens, positions, refused)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return self._padded(given, tokens, mask, refused)
        return AS_IT_COMES

    def _padded(self, given: dict, tokens: Tensor, mask: Tensor, refused: Note | None) -> UnpadDecision:
        labels, unknown, model = loss_caller.causal_labels()
        if reason := refused or self._now() or unknown or refusals.call(given, mask, tokens, labels):
            return UnpadDecision(reason=reason, plain=mask)
        real = (mask != 0).to(tokens.device)
        padding, labelled = ~real, F.pad(labels.to(real.device) != IGNORED, (0, 1))
        read = (padding & (labelled[:, :-1] | labelled[:, 1:])).sum()  # by a loss that shifts, or by one that does not
        runs = (real & F.pad(padding, (1, 0), value=True)[:, :-1]).sum(1).amax()
        count, read, runs = torch.stack([real.sum(), read, runs]).tolist()  # the one host read of the step
        if count == real.numel() or not count:
            return AS_IT_COMES
        if read:
            return UnpadDecision(reason=note("labels-at-padding"))
        if runs > 1:
            return UnpadDecision(reason=note("row-interrupted"))
        if reason := refusals.watched(self.owner, model):
            return UnpadDecision(reason=reason)
        return UnpadDecision(FlatBatch.of(real, count))

    def _packed(self, given: dict, tokens: Tensor, positions: Tensor, refused: Note | None) -> UnpadDecision:
        """Sequences are told apart by offsets, where a mask would do so."""
        if positions.dim() != 2 or positions.shape[0] not in (1, len(tokens)) or positions.shape[1] != tokens.shape[1]:
            return AS_IT_COMES
        starts, apart = packed_masks.beginnings(positions, tokens.shape[:2]), self.keeps_apart(given, tokens)
        if apart is False:
            reason = note("sequences-see-each-other")
        elif apart is None:
            reason = note("masks-not-understood")
        else:
            reason = refused or self._now() or refusals.arguments(given) or refusals.watched(self.owner)
        if reason:
            return UnpadDecision(reason=reason, batches=PACKED, plain=~starts[:, 1:])
        starts = starts.cpu()  # the one host read of the step
        return (
            UnpadDecision(FlatBatch.packed(starts, tokens.device)) if int(starts.sum()) > len(starts) else AS_IT_COMES
        )

    def keeps_apart(self, given: dict, tokens: Tensor) -> bool | None:
        """Whether the model's own masks keep packed sequences apart. Tried once for each way in which the model can be
        called.
        """
        way = (
            given.get("use_cache"),
            getattr(self.owner.config, "use_cache", None),
            getattr(self.owner, "gradient_checkpointing", None),
        )
        if way not in self.apart:
            self.apart[way] = packed_masks.keeps_apart(self.owner, self.layers, given, tokens)
        return self.apart[way]

    def _now(self) -> Note | None:
        """Why no batch can be flattened now: settings that the user may change at any time."""
        config = self.owner.config
        if (device := next(self.owner.parameters()).device).type == "cuda":
            if torch.cuda.get_device_capability(device) < (8, 0):
                return note("gpu-without-kernel")
            half = self.owner.dtype in HALF or torch.is_autocast_enabled("cuda")
            if not half:  # told here, before layers are compiled in vain
                return note("no-unpadded-kernel")
        if (name := config._attn_implementation_internal) != "sdpa":
            return note("other-attention", str(name))
        for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
            if getattr(config, name, False):
                return note("output-required", name)
        if context_parallel.is_shared():
            return note("context-parallel")
        return note("checkpoint-around-layers") if in_checkpoint() else None
