"""A layer's compiled code: which variant a call runs, of what kind it is, and whether it is a part of a stack."""

from __future__ import annotations

import math
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tunecompile._torch.autograd import in_backward, in_checkpoint, innermost_hooks
from tunecompile._torch.distributed import around_now
from tunecompile._torch.modules import global_hooks
from tunecompile._torch.saved_strides import hooks_were_seen, notice_hooks
from tunecompile.integrations import context_parallel, output_capturing
from tunecompile.planner.solver import KEEP, RECOMPUTE, Plan
from tunecompile.runtime.cuda_graphs.recorded_graph import unrecorded
from tunecompile.runtime.cuda_graphs.stacks import Stacks
from tunecompile.runtime.layers.between import call_in_stack, go_on, stand_in
from tunecompile.runtime.layers.dynamic_shapes import (
    DynamicShapes,
    has_streams,
    mark_flat,
    mark_patches,
    mark_streams,
    tensors_in,
)
from tunecompile.runtime.layers.force_grad import Shared, require_grad, without_graph, without_view
from tunecompile.runtime.layers.placed_layer import PlacedLayer
from tunecompile.runtime.layers.region import EVALUATION, SCORING, CallKind, Region
from tunecompile.runtime.layers.unread_weights import are_unread
from tunecompile.runtime.layers.unused_results import are_read
from tunecompile.runtime.layers.variant import Variant, unchanged
from tunecompile.runtime.memory.budget import RuntimePlanner
from tunecompile.runtime.memory.given_containers import holds_containers
from tunecompile.runtime.step.state import Step
from tunecompile.runtime.unpad.documents import windows_of
from tunecompile.runtime.unpad.flat_batch import LONGEST_IMAGE, OFFSETS, WINDOW, FlatBatch
from tunecompile.runtime.unpad.handed_on import mappings_in
from tunecompile.runtime.unpad.unpad import Unpadding


class CompiledLayer(PlacedLayer):
    """Runs one layer by compiled code, under the plan of its step.

    Args:
        step: the running one.
        layer: as it is in the model.
        region: of its kind, which has the code.
    """

    def __init__(self, step: Step, layer: nn.Module, region: Region):
        super().__init__(layer, region)
        self.step = step
        self.place, self.stack = 0, 0  #: among all layers, and the number of its list of layers
        self.first = False  #: in its list of layers
        #: whether others read keys that it keeps; None where it keeps none (see `shared_keys`)
        self.keys_read: bool | None = None
        self.window = max(0, windows_of(layer)[0])  #: tokens that attention sees, by its attributes; 0 for all
        self.checkpoint = False  #: whether the user enabled gradient checkpointing
        self.paddings: tuple[Unpadding, Unpadding] | None = None  #: of training steps, and of evaluations
        self.variant: Variant | None = None
        self.flat: FlatBatch | None = None  #: the row that the call under way runs on
        self.collected = output_capturing.Collected()  #: by that call
        self.joined: tuple[Variant, tuple] | None = None  #: what ran it last as a part of a stack, if it was one

    @property
    def padding(self) -> Unpadding | None:
        """What decides on padding in the call that runs."""
        if self.paddings is None:
            return None
        return self.paddings[self.step.evaluates and not in_backward()]

    @property
    def budget(self) -> RuntimePlanner | None:
        """The planner of the layer's device, where there is a budget."""
        return self.step.budget_of(self)

    def compiled(self, args: tuple, kwargs: dict, finish: Callable = unchanged) -> Any:
        """The layer's call; `finish` gets its output while saved tensors are still hooked."""
        if self.placement is not None:
            if self.states is not None:
                self.states.put_back()
            return self.placement.call(lambda args, kwargs: self._compiled(args, kwargs, finish), args, kwargs)
        return self._compiled(args, kwargs, finish)

    def _compiled(self, args: tuple, kwargs: dict, finish: Callable) -> Any:
        notice_hooks()
        args, kwargs, shared = self._told(args, kwargs)
        kind, sizes = self._kind(args, kwargs)
        budget = self.budget
        if self.region.kept is not None:
            self.region.kept.enter(self.place, self.stack)
        if budget is None:
            self.variant = self.region.variant(RECOMPUTE if self.checkpoint else KEEP, kind)
            return self.step.telling(lambda: self._call(args, kwargs, shared, joins=self._joins()))
        plan, look = budget.plan_for(self, kind, math.prod(sizes))
        with budget.around(self, planned=look is None):
            if look is None:
                self.variant = self.region.variant(plan, kind)
                output = self._call(args, kwargs, shared, joins=self._joins() and not budget.offloading)
            else:
                output = self.region.surveyed(plan, kind, look, lambda made: self._call(args, kwargs, shared, made))
            budget.follow(self, output)
            return finish(output)

    def _told(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, Shared | None]:
        """The arguments, as they are traced, and whose memory they share: the first layer's, or behind a row."""
        shared, running = None, None if self.padding is None else self.padding.running
        if self.first or (running is not None and (running.drops or running.rounded is not None)):
            args, kwargs, shared = without_view(args, kwargs)
        return args, kwargs if self.images is None else self.images.tell(args, kwargs), shared

    def _kind(self, args: tuple, kwargs: dict, scores: bool = False) -> tuple[CallKind, tuple[int, ...]]:
        """The key of a variant, and the batch's sizes, which are marked as dynamic."""
        tensors = list(tensors_in(args, kwargs))
        sizes = DynamicShapes.of(tensors)
        if OFFSETS in kwargs:
            mark_flat(tensors, sizes[1])
        elif LONGEST_IMAGE in kwargs or (self.region.in_tower and len(sizes) == 1):
            mark_patches(tensors)
            self.step.images = True
        elif not self.takes_ids and has_streams(tensors, sizes):
            mark_streams(tensors, sizes)
        else:
            other = scores or self.step.images  # than the first lengths: rows are as long as their images are large
            seen = self.region.evaluated if self.step.evaluates else self.region.sizes
            (seen.mark_all if other else seen.mark)(tensors, sizes, self.place)
        self.hooks = self.inside.hooks
        setting = (
            torch.is_grad_enabled(),
            context_parallel.is_shared(),
            kwargs.get(WINDOW),
            self.hooked(),
            hooks_were_seen(),  # graphs that were made before may have come from a cache
            self.region.classes.version,
            self.switched_off.active,  # else a policy's calls look at its reference's guards, and the other way round
        )
        ones, kinds = (size == 1 for size in sizes), ((where, t.dtype, t.requires_grad) for where, t in tensors)
        by_hooks = output_capturing.collects_attention(self.owner) and not setting[3] and not self.inside.collected
        left_out = are_unread(kwargs, by_hooks) and self.placement is None and not self.region.weights_read
        return CallKind(setting, (*ones, *kinds), OFFSETS in kwargs, left_out), sizes

    def scored(self, args: tuple, kwargs: dict) -> Any:
        """A forward without gradients, by the code that trains: of another graph some sums are rounded otherwise."""
        with self.switched_off.scaled_by_0() as scaled:
            plan = None if self.step.evaluates else self._scores_as(args, kwargs)
            if plan is None:
                args, kwargs, _ = self._told(args, kwargs)
                way = EVALUATION if self.step.evaluates else SCORING
                self.variant = self.region.scoring(self._kind(args, kwargs, scores=True)[0], scaled, way)
                return self._call(args, kwargs)
            with unrecorded(self.region.replays), torch.enable_grad():
                args, kwargs, forced = self.differentiable(args, kwargs)
                args, kwargs, shared = self._told(args, kwargs)
                kind, _ = self._kind(args, kwargs, scores=scaled)
                self.variant = self.region.reference(plan, kind) if scaled else self.region.variant(plan, kind)
                if self.region.kept is not None and not scaled:
                    self.region.kept.enter(self.place, self.stack)
                output = without_graph(self._call(args, kwargs, shared))
        if forced is not None:
            forced.hand_back()
        return output

    def _scores_as(self, args: tuple, kwargs: dict) -> Plan | None:
        """The plan of the training steps whose code scores; None where a graph without a backward has to.

        That is where nobody would drop what is saved (hooks and containers get values of the layer), where other ranks
        gather its weights, and where the plan of memory is for smaller batches, or is not made yet.
        """
        self.hooks = self.inside.hooks
        if self.placement is not None or self.hooked() or self.inside.collected or holds_containers(args, kwargs):
            return None
        if not any(parameter.requires_grad for parameter in self.layer.parameters()):
            return None
        if self.budget is None:
            return RECOMPUTE if self.checkpoint else KEEP
        tokens = math.prod(DynamicShapes.of(list(tensors_in(args, kwargs))))
        return self.budget.known_plan(self, tokens)

    @property
    def stacks(self) -> Stacks | None:
        """The recordings of layers that follow each other."""
        return None if self.region.replays is None else self.region.replays.stacks

    def _joins(self) -> bool:
        """Whether nobody looks at what is between this layer and others, nor has to be there at its call."""
        alone = self.placement is None and self.checkpointed_by is None and self.step.recovery is None
        repeated = in_backward() or in_checkpoint() or innermost_hooks() is not None
        looked_at = any(self.hooks) or any(global_hooks()) or self.inside.collected
        return alone and self.images is None and not repeated and not looked_at and around_now() is None

    @property
    def _setting(self) -> tuple:
        """What Dynamo has no guard for, where there are no hooks."""
        return self.region.classes.version, self.switched_off.active

    def followed(self, args: tuple, kwargs: dict) -> Any:
        """The output of a layer whose stack is being replayed; None where its call is not the one that was replayed,
        as far as its arguments tell, or where that has to be found out.
        """
        stacks, budget = self.stacks, self.budget
        under_way = None if stacks is None else stacks.replayed
        if under_way is None or under_way.given is None or self.joined is None or stacks.thread != get_ident():
            return None
        passed = under_way.given.passed_with(args, kwargs, under_way.output)
        self.hooks = self.inside.hooks
        if passed is None or self.joined[1] != self._setting or not self._joins():
            return None
        self.variant = self.joined[0]
        if self.region.kept is not None:
            self.region.kept.enter(self.place, self.stack)
        output, form = go_on(stacks, self.variant.call, self.layer, *passed), under_way.given.form
        if output is None:
            return None
        if self.padding is not None:
            self.padding.layer_ran()
        if budget is not None:
            budget.follow(self, output)
        late = stand_in(output, stacks, form)
        return pytree.tree_map_only(Tensor, form.leave, output) if late is None else late

    def _call(
        self,
        args: tuple,
        kwargs: dict,
        shared: Shared | None = None,
        made: Variant | None = None,
        joins: bool = False,
    ) -> Any:
        self.variant = made or self.variant
        self.variant.batch = self.step.batches
        leave = None if self.flat is None else self.flat.leave_inside
        captured = output_capturing.collecting(self.hooks, in_backward(), leave)
        keys = self.region.keys if self.keys_read else None
        with context_parallel.outside(self.padding), captured as collected, are_read(keys):
            self.variant.collects = collected.asked
            if self.flat is not None:
                self.collected, self.variant.shares = collected, self.flat.shared is not None
                self.variant.own = {*collected.lists, *mappings_in(args, kwargs)}
            if self.stacks is None:
                output = self.variant.call(self.layer, *args, **kwargs)
            else:
                joins = joins and self.variant.is_one_graph and not collected.asked
                self.joined = (self.variant, self._setting) if joins else None
                kept = self.inside.kept if joins else None
                output = call_in_stack(self.stacks, self.variant.call, self.layer, kept, args, kwargs)
        if shared is not None:
            shared.hand_back()
        return output

    def differentiable(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, Shared | None]:
        """The arguments, with hidden states that require a gradient, and whose memory these share, if they do."""
        return require_grad(self.layer, args, kwargs)

    def note_eager(self) -> None:
        """A call runs by the layer's own code although it should have been compiled.

        Raises:
            RuntimeError: its hidden states are none of its own.
        """
        if self.stacks is not None and self.stacks.joins and self.stacks.replayed is not None:
            raise RuntimeError("a layer of a recorded stack was called otherwise")
        if self.variant is not None:
            self.variant.eager += 1
