"""The slot of a layer, which calls of it run: compiled code in a training step, the layer's own code otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from tunecompile._torch.autograd import in_backward, in_checkpoint
from tunecompile._torch.dynamo import is_compiling
from tunecompile._torch.modules import call_original
from tunecompile.integrations import context_parallel, output_capturing, shared_keys
from tunecompile.integrations.transformers import without_cache
from tunecompile.notes import Note, note
from tunecompile.runtime.cuda_graphs.between import Form
from tunecompile.runtime.layers.between import passed_on, stand_in
from tunecompile.runtime.layers.compiled_layer import CompiledLayer
from tunecompile.runtime.layers.dynamic_shapes import DynamicShapes, tensors_in
from tunecompile.runtime.layers.force_grad import drop_graph
from tunecompile.runtime.layers.region import Region
from tunecompile.runtime.layers.unread_weights import unread
from tunecompile.runtime.step.mode import Mode, mode_again, mode_of_layer
from tunecompile.runtime.step.rows_refused import RowsRefused
from tunecompile.runtime.step.state import Step
from tunecompile.runtime.unpad.decision import PACKED
from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.handed_on import HandedOn, RowCall, entries_before, note_written
from tunecompile.runtime.unpad.masks.one_form import in_one_form
from tunecompile.runtime.unpad.masks.pairs import real_masks
from tunecompile.runtime.watch.traced_graph import last_graph


class Entry(Protocol):
    """Where a pass through the layers of one owner begins."""

    entered: bool  #: whether the owner was ever called

    def begin(self) -> None:
        """A pass begins without a call of the owner."""


class LayerSlot(CompiledLayer):
    """Runs the calls of one layer."""

    def __init__(self, step: Step, layer: nn.Module, region: Region):
        super().__init__(step, layer, region)
        self.entry: Entry | None = None
        self.called = False  #: whether it ever was
        #: how its last forward of a training step ran, and the last one in training mode, which may be without
        #: gradients: what is repeated in a backward pass runs as it did
        self.trained_as = self.ran_as = Mode.TRAIN
        #: a checkpoint function of the user's, called with the layer and its arguments by position
        self.checkpointed_by: Callable | None = None
        self.batch = 0  #: the number of its owner's call in which it trained last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (rollout := self.step.rollout) is not None:
            return rollout.call(self, args, kwargs)
        self.called = True
        output = self._run(args, kwargs)
        if self.variant is None or not self.variant.unread:
            return output
        return unread(output, lambda: self._read(args, kwargs))

    def _read(self, args: tuple, kwargs: dict) -> Any:
        """The layer's own output, where attention weights are read that its caller did not request."""
        self.region.weights_read = True
        return call_original(self.layer, *args, **kwargs)

    def _run(self, args: tuple, kwargs: dict) -> Any:
        mode = self._mode()
        if self.padding is not None:
            self.padding.begin_layers()
        if mode is Mode.EAGER or self._refused():
            return call_original(self.layer, *args, **kwargs)
        if self.step.makes_cache:
            args, kwargs = without_cache(args, kwargs)
        if mode is Mode.TRAIN and (output := self.followed(args, kwargs)) is not None:
            return output
        if self._loops(args, kwargs):
            return call_original(self.layer, *args, **kwargs)
        found = self.padding.batch_of(self.layer, args, kwargs) if self.padding is not None else None
        if found is None:
            if self.padding is not None:
                kwargs = self.padding.with_bounds(self.layer, kwargs)
            return self._as_it_comes(mode, args, kwargs)
        flat, mask = found
        keep = not in_backward() and not in_checkpoint()
        if (row := RowCall.of(flat, mask, args, kwargs, keep, self._unread)) is None:
            return self._padded(note("argument-given", "one without tokens"), flat, mode, args, kwargs)
        try:
            output = self._run_on(row, mode, args, kwargs)
        except RowsRefused as refused:
            output_capturing.take_back(self.collected)
            self.region.forget(self.variant if flat.bounds is None else None)  # a tower's runs other rows as well
            return self._padded(refused.reason, flat, mode, args, kwargs)
        finally:
            self.collected = output_capturing.Collected()  # its lists hold values
        form = Form(flat.rows, flat.unflatten, flat.shape)
        late = stand_in(output, self.stacks, form, args, kwargs, (row.args, row.kwargs))
        return flat.leave(output, keep) if late is None else late

    def _run_on(self, row: RowCall, mode: Mode, args: tuple, kwargs: dict) -> Any:
        """The layer's output for a row; `RowsRefused` where it cannot run on one. args, kwargs: for the batch."""
        self.flat = row.flat
        try:
            output = self._run_as(mode, row.args, row.kwargs)
        finally:
            self.flat = None
        self.padding.layer_ran()
        why = self.padding.rounding.ran(self.layer, row.flat, args, kwargs, last_graph())
        if why is None and self.keys_read is not False:
            why = row.hand_on(last_graph(), self.padding.running)
        if why is not None:
            raise RowsRefused(why)
        return output

    @property
    def _unread(self) -> str:
        """The argument whose entries the layer does not read: it keeps keys of its own there."""
        return "" if self.keys_read is None else shared_keys.MAPPING

    def _padded(self, reason: Note, flat: FlatBatch, mode: Mode, args: tuple, kwargs: dict) -> Any:
        """The call as it comes, where the layer cannot run on a row of documents.

        Raises:
            RowsRefused: layers before it have left out what stands at padding, or prefixes that rows share, so that
                all have to begin anew.
        """
        if flat.drops or flat.shared is not None:
            raise RowsRefused(reason)
        if flat.rounds:
            self.padding.rounding.refuse(reason)
        else:
            self.padding.refuse(reason, PACKED)
        return self._as_it_comes(mode, args, kwargs)

    def _as_it_comes(self, mode: Mode, args: tuple, kwargs: dict) -> Any:
        """The call on the batch, with masks that were not made yet: Dynamo cannot trace what computes them."""
        given = args, kwargs
        args, kwargs = passed_on(self.stacks, *given)
        if self.padding is not None and self.padding.recorded:
            args, kwargs = real_masks(args), real_masks(kwargs)
        kept = kwargs.get(self._unread)
        if kept is not None:
            kwargs = {**kwargs, self._unread: HandedOn.without_entries(kept).given}
        before = entries_before(args, kwargs)
        passed = in_one_form(None if self.padding is None else self.padding.running, args, kwargs)
        output = self._run_as(mode, *passed)
        if before:
            note_written(before, DynamicShapes.of(list(tensors_in(args, kwargs))))
        if kept is not None and self.keys_read:
            kept.update(kwargs[self._unread])
        if self.padding is not None:
            self.padding.rounding.came(self.layer, args, kwargs, last_graph())
        late = stand_in(output, self.stacks, Form(), *given, passed)
        return output if late is None else late

    def _run_as(self, mode: Mode, args: tuple, kwargs: dict) -> Any:
        if mode.without_gradients:
            run = self.scored if self.placement is None else partial(self.placement.call, self.scored)
            return self._gathered(run, args, kwargs)
        args, kwargs, forced = self.differentiable(args, kwargs)
        if forced is None:
            return self._gathered(self._trained, args, kwargs)
        nodes = forced.nodes  # of a tensor that the layer writes into, the node is another one afterwards
        output = drop_graph(self._gathered(self._trained, args, kwargs), nodes)
        forced.hand_back()
        return output

    def _mode(self) -> Mode:
        if is_compiling():  # the user compiles the whole model
            return Mode.EAGER
        training, gradients = self.layer.training, torch.is_grad_enabled()
        if in_backward():
            # A checkpoint around the layer recomputes it. Other forwards (evaluation, a reference model) may have run
            # since the one it repeats, so the step says nothing here.
            return mode_again(self.ran_as if self.step.in_backward else self.trained_as, training, gradients)
        alone = self.entry is not None and not self.entry.entered  # an owner that is called by its `forward`, say
        if alone and self.first:
            self.entry.begin()
        mode = mode_of_layer(self.step.mode, training, gradients)
        if mode is Mode.EAGER and not self.step.entered and training and gradients:
            self.region.bypassed = True
        if mode is Mode.TRAIN and self.owner is not None and not self.step.repeats:
            self.region.again |= self.batch == self.step.batches
            self.batch = self.step.batches
        if mode is not Mode.EAGER and (why := self.region.effort.eager) is not None:
            self._run_eagerly(why)
            mode = Mode.EAGER
        if training:
            self.ran_as = mode
            if gradients or alone:  # (a re-entrant checkpoint runs it without)
                self.trained_as = mode
        return mode

    def _gathered(self, run: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """`run`, between the hooks of FSDP2 if the layer is a unit of its own: a repetition inside finds gathered
        weights.
        """
        return run(args, kwargs) if self.placement is None else self.placement.around(run, args, kwargs)

    def _refused(self) -> bool:
        """Whether hooks of accelerate's, or context parallelism, cannot be compiled around."""
        if self.inside is None:
            self.look_around()
        why = self.placement.refused if self.placement is not None else None
        if self.step.replaced is not None:
            why = note("function-replaced", self.step.replaced)
        if (
            not why
            and context_parallel.is_shared()
            and (self.padding is None or not context_parallel.can_run_outside(self.padding.owner))
        ):
            why = note("context-parallel-attention")
        self.region.refused.update([why] if why else [])
        return bool(why)

    def _loops(self, args: tuple, kwargs: dict) -> bool:
        """Whether its own code has a loop over tokens, which cannot be compiled in reasonable time."""
        why = self.region.loops.refuse(
            self.layer, partial(call_original, self.layer), args, kwargs, new=not in_backward()
        )
        if why is None:
            return False
        self._run_eagerly(why)
        return True

    def _run_eagerly(self, why: Note) -> None:
        """A call is going to run by the layer's own code.

        Raises:
            RowsRefused: layers before it have left out what stands at padding, which it would read.
        """
        running = None if self.padding is None else self.padding.running
        if running is not None and running.drops and not in_backward():
            raise RowsRefused(note("runs-eagerly"))
        self.region.refused[why] += 1

    def _trained(self, args: tuple, kwargs: dict) -> Any:
        if self.checkpointed_by is not None:
            return self.checkpointed_by(lambda *args: self.compiled(args, kwargs), *args)
        recovery = self.step.recovery
        return self.compiled(args, kwargs) if recovery is None else recovery.layer(self, args, kwargs)
