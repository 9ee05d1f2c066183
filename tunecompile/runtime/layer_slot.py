"""What stands in a layer's `_compiled_call_impl`: compiled in a training step, the layer as it was otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tunecompile._torch.autograd import in_backward
from tunecompile._torch.dynamo import is_compiling
from tunecompile._torch.modules import call_original, global_hooks, is_of
from tunecompile.integrations import context_parallel
from tunecompile.integrations.accelerate import DeviceMapLayer, place
from tunecompile.integrations.bitsandbytes import put_states_back
from tunecompile.integrations.deepspeed import Zero3Layer, gathered
from tunecompile.integrations.fsdp import FsdpLayer, unit
from tunecompile.integrations.varlen_attention import OFFSETS, CannotFlatten
from tunecompile.planner.solver import KEEP, RECOMPUTE
from tunecompile.runtime.dynamic_shapes import DynamicShapes, mark_flat, tensors_in
from tunecompile.runtime.force_grad import ask, unasked
from tunecompile.runtime.memory.oom_recovery import sharded
from tunecompile.runtime.module_watch import ModuleSnapshot
from tunecompile.runtime.region import Region
from tunecompile.runtime.unpad.unpad import Unpadding
from tunecompile.runtime.variant import Variant, _same

_ENGINES = ("tunecompile.", "torch.distributed.", "accelerate.", "deepspeed.")


class LayerSlot:
    """What stands in a layer's `_compiled_call_impl`: compiled in a training step, the layer as it was otherwise."""

    def __init__(self, step: Any, layer: nn.Module, region: Region):
        self.step, self.layer, self.region = step, layer, region
        self.place = 0  #: among all layers
        self.checkpoint = False  #: whether the user asks for it
        self.checkpointed_by: Callable | None = (
            None  #: a function of the user's, called with the layer and its arguments by position
        )
        self.padding: Unpadding | None = None
        self.variant: Variant | None = None
        self.inside: ModuleSnapshot | None = None
        self.placement: DeviceMapLayer | Zero3Layer | FsdpLayer | None = (
            None  #: where accelerate put the layer, or what DeepSpeed or FSDP2 gathers for it
        )
        self.states: RemovableHandle | None = None  #: of the hook that gives gathered weights their quantisation state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            is_compiling() or (not (scores := self._scores()) and not self._trains()) or self._refused()
        ):  # the user compiles the whole model: stay out
            return call_original(self.layer, *args, **kwargs)
        if scores:
            return self._gathered(self._scored, args, kwargs)
        args, kwargs, asking = self.differentiable(args, kwargs)
        output = self._gathered(self._trained, args, kwargs)
        return output if asking is None else unasked(output, asking)

    @property
    def gathers(self) -> bool:
        """Whether FSDP2 gathers the layer, and all that is sent is sent around its call."""
        if self.inside is None:
            self._look_around()
        return isinstance(self.placement, FsdpLayer) and self.placement.alone

    def _gathered(self, run: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """`run`, between the hooks of FSDP2 if the layer is a unit of its own: whatever has to be repeated there is repeated with gathered weights."""
        return self.placement.around(run, args, kwargs) if isinstance(self.placement, FsdpLayer) else run(args, kwargs)

    def _trained(self, args: tuple, kwargs: dict) -> Any:
        if self.checkpointed_by is not None:
            return self.checkpointed_by(lambda *args: self.compiled(args, kwargs), *args)
        recovery = self.step.recovery
        return self.compiled(args, kwargs) if recovery is None else recovery.layer(self, args, kwargs)

    def _scored(self, args: tuple, kwargs: dict) -> Any:
        return self._score(args, kwargs) if self.placement is None else self.placement.call(self._score, args, kwargs)

    def _refused(self) -> bool:
        """Whether accelerate's hooks, or shared attention, do what cannot be compiled."""
        if self.inside is None:
            self._look_around()
        why = self.placement.refused if self.placement is not None else ""
        if (
            not why
            and context_parallel.is_shared()
            and (self.padding is None or not context_parallel.can_run_outside(self.padding.owner))
        ):
            why = context_parallel.REFUSED
        self.region.refused.update([why] if why else [])
        return bool(why)

    def _look_around(self) -> None:
        """At the first step, when adapters are in place and devices are chosen."""
        self.placement = place(self.layer) or gathered(self.layer) or unit(self.layer)
        self.states = put_states_back(self.layer)
        if self.region.replays is not None and any(map(sharded, self.layer.parameters())):
            # what is gathered lies elsewhere at every call, and where another layer's weights were; a recorded collective waits for all ranks
            self.region.replays.leave_out(next(self.layer.parameters()).device)
            self.region.replays = None
        self.inside = ModuleSnapshot(self.layer)

    def follow_modules(self) -> None:
        """Adapters may have come into the layer, and hooks with them."""
        if self.inside is not None and self.inside.changed:
            self.inside = ModuleSnapshot(self.layer)

    @property
    def stays(self) -> bool:
        """Whether the layer's weights are its own (FSDP1 takes them away), are where they are, and this process's alone."""
        if self.inside is None:
            self._look_around()
        parameters = list(self.layer.parameters())
        return (
            bool(parameters)
            and not isinstance(self.placement, (Zero3Layer, FsdpLayer))
            and not any(map(sharded, parameters))
        )

    def let_go(self) -> None:
        """Undo that."""
        if isinstance(self.placement, Zero3Layer):
            self.placement.let_go()
        if self.states is not None:
            self.states.remove()

    @property
    def budget(self) -> Any:
        """What gives the layer its plan, if anything does."""
        return self.step.budget_of(self)

    @property
    def device(self) -> torch.device | None:
        """Where the layer's weights are; None where accelerate keeps them elsewhere between calls."""
        return next((parameter.device for parameter in self.layer.parameters() if not parameter.is_meta), None)

    def compiled(self, args: tuple, kwargs: dict, finish: Callable = _same) -> Any:
        """The layer's call; `finish` sees its output while what the layer saves is still looked after."""
        if self.placement is not None:
            return self.placement.call(lambda args, kwargs: self._compiled(args, kwargs, finish), args, kwargs)
        return self._compiled(args, kwargs, finish)

    def _compiled(self, args: tuple, kwargs: dict, finish: Callable) -> Any:
        return self._marked(kwargs, lambda mark: self._run(args, kwargs, mark, finish))

    def _marked(self, kwargs: dict, run: Callable[[Callable], Any]) -> Any:
        """`run`, given what marks the sizes that may change: others where the batch comes without its padding."""
        return self._flattened(run) if OFFSETS in kwargs else run(self.region.sizes.mark)

    def _run(self, args: tuple, kwargs: dict, mark: Callable, finish: Callable) -> Any:
        kind, sizes = self._kind(args, kwargs, mark)
        budget = self.budget
        if self.region.kept is not None:
            self.region.kept.enter(self.place)
        if budget is None:
            self.variant = self.region.variant(RECOMPUTE if self.checkpoint else KEEP, kind)
            return self.step.telling(lambda: self._call(args, kwargs))
        option = budget.option(self, math.prod(sizes))
        self.variant = self.region.variant(option and option.plan, kind, budget.decide)
        try:
            with budget.around(self):
                output = self._call(args, kwargs)
                budget.ran(self, output)
                return finish(output)
        finally:
            if option is None:
                self.region.settle(kind)

    def _kind(self, args: tuple, kwargs: dict, mark: Callable) -> tuple[tuple, tuple[int, ...]]:
        """What calls of one variant share, and the batch's sizes, which are marked as what may change."""
        tensors = list(tensors_in(args, kwargs))
        sizes = DynamicShapes.of(tensors)
        mark(tensors, sizes)
        return (
            torch.is_grad_enabled(),
            context_parallel.is_shared(),
            self._hooked(),
            *(size == 1 for size in sizes),
            *((where, t.dtype, t.requires_grad) for where, t in tensors),
        ), sizes

    def _score(self, args: tuple, kwargs: dict) -> Any:
        """A forward without gradients."""

        def run(mark: Callable) -> Any:
            self.variant = self.region.scoring(self._kind(args, kwargs, mark)[0])
            return self._call(args, kwargs)

        return self._marked(kwargs, run)

    def _call(self, args: tuple, kwargs: dict) -> Any:
        with context_parallel.outside(self.padding):
            return self.variant.call(self.layer, *args, **kwargs)

    def differentiable(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, Any]:
        """The arguments, with hidden states that require a gradient, and the node that was made for that."""
        return ask(self.layer, args, kwargs)

    def _flattened(self, run: Callable[[Callable], Any]) -> Any:
        """Of a batch without its padding. Nothing but attention may mix tokens, so what is compiled has to contain it."""
        try:
            with (
                self.padding.attention()
            ):  # a checkpoint around the layer recomputes it when the owner's call is long over
                output = run(lambda tensors, sizes: mark_flat(tensors, sizes[1]))
            if not self.variant.attends:
                raise CannotFlatten("its layers do not call attention by transformers' attention interface")
            return output
        except CannotFlatten:
            self.region.variants = {
                key: variant for key, variant in self.region.variants.items() if variant is not self.variant
            }
            raise

    def _hooked(self) -> tuple:
        """The code of all hooks that are called inside. Dynamo traces those it finds, and has no guard against others that come later."""
        of_all = global_hooks()
        if not of_all and not any(self.inside.hooks):
            return ()
        return tuple(
            getattr(hook, "__code__", type(hook)) for hooks in (*of_all, *self.inside.hooks) for hook in hooks.values()
        )

    @property
    def watched(self) -> bool:
        """Whether a hook sees what is inside, and may keep it: others than those of engines, which put the layer's weights in place."""
        return self.inside.collected or any(
            not is_of(hook, _ENGINES) for hooks in (*global_hooks(), *self.inside.hooks) for hook in hooks.values()
        )

    def _trains(self) -> bool:
        if in_backward():
            # A checkpoint around the layer recomputes it. Other forwards (evaluation, a reference model) may have run since the
            # one it repeats, so the step's flag says nothing here.
            return self.layer.training and torch.is_grad_enabled()
        if not self.step.active and not self.step.entered and self.layer.training and torch.is_grad_enabled():
            self.region.bypassed = True
        return self.step.active

    def _scores(self) -> bool:
        return self.step.scoring and self.layer.training and not torch.is_grad_enabled() and not in_backward()

    def note_eager(self) -> None:
        if self.variant is not None:
            self.variant.eager += 1


LARGE = (
    256 << 20
)  #: bytes of hidden states in fp32, from which on a norm outside the layers is compiled: eager code holds several such copies


class NormSlot(LayerSlot):
    """What stands in the `_compiled_call_impl` of a norm outside the layers: of a long batch it is compiled in a training step. It has no plan."""

    budget = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = next((tensor for _, tensor in tensors_in(args, kwargs)), None)
        if (
            is_compiling()
            or not self.step.active
            or not torch.is_grad_enabled()
            or hidden is None
            or 4 * hidden.numel() < LARGE
            or self._refused()
        ):
            return call_original(self.layer, *args, **kwargs)
        return self._gathered(self.compiled, args, kwargs)
