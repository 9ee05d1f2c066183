"""Head and loss, fused wherever the loss is computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tunecompile._torch.modules import empty, fill, slot_of
from tunecompile.compiler.pass_manager import MatchCount
from tunecompile.integrations.loss_caller import causal_labels
from tunecompile.integrations.trl import home_of_replacement
from tunecompile.notes import Note, note
from tunecompile.runtime.loss_head import Head, HeadSlot
from tunecompile.runtime.model_state import ModelCall, Part, State


class LossHead(Part):
    """The slot of the output embedding."""

    def __init__(self) -> None:
        self.embeddings: nn.Module | None = None  #: the head that was found

    def attach(self, state: State) -> None:
        if not state.stacks:
            return
        find = getattr(state.model, "get_output_embeddings", None)
        module = self.embeddings = find() if callable(find) else None
        if not isinstance(module, nn.Module):
            state.notes.append(note("no-output-embedding"))
            return
        if slot_of(module) is not None:
            state.notes.append(note("compiled-already", "the head"))
            return

        def logits_are_read(hidden: Tensor, autocast: torch.dtype | None) -> Tensor | None:
            found = [padding.logits_are_read(hidden, autocast) for padding in state.paddings]
            return next((whole for whole in found if whole is not None), None)

        def evaluated_logits_are_read(hidden: Tensor, autocast: torch.dtype | None) -> Tensor | None:
            found = (each.logits_are_read(hidden, autocast) for each in state.evaluations)
            return next((whole for whole in found if whole is not None), None)

        head = Head(
            module,
            MatchCount("linear_cross_entropy", found=1),
            lambda: any(padding.flat for padding in (state.evaluations if state.step.evaluates else state.paddings)),
            logits_are_read,
            evaluated_logits_are_read,
            lambda: causal_labels()[0] is not None,
            state.step.recovery.attempt if state.step.recovery else state.step.telling,
        )
        fill(module, HeadSlot(state.step, head, state.passes))
        state.heads.append(head)

    def before_step(self, state: State, call: ModelCall) -> None:
        """An adapter may have put another module in the head's place since the last step."""
        if self.embeddings is not None and (found := state.model.get_output_embeddings()) is not self.embeddings:
            state.notes.append(note("head-replaced", type(found).__name__))
            self.detach(state)
            self.attach(state)

    def notes(self, state: State) -> list[Note]:
        """Heads that no training step called, where there were steps."""
        if not any(region.variants for region in state.regions):
            return []
        homes = [home for module in (state.base(), state.model) if (home := home_of_replacement(module)) is not None]
        who = note("package-computes-loss", homes[0]) if homes else note("loop-computes-loss")
        unused = [head for head in unused_heads(state) if not head.tally.rewritten]  # by way of its weight, in scores
        return [note("head-not-called", detail=who)] * len(unused)

    def detach(self, state: State) -> None:
        for head in state.heads:
            if isinstance(slot := slot_of(head.module), HeadSlot):
                empty(head.module, slot)
                slot.release()
        state.heads.clear()


def unused_heads(state: State) -> list[Head]:
    """Heads that no training step has called."""
    return [head for head in state.heads if not getattr(slot_of(head.module), "called", True)]
