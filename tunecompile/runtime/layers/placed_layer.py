"""A layer where it is: who puts its weights in place, what modules and hooks it has, and what of this has changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tunecompile._torch.distributed import sharded
from tunecompile._torch.modules import global_hooks, is_of
from tunecompile.integrations import output_capturing
from tunecompile.integrations.accelerate import place
from tunecompile.integrations.bitsandbytes import PackedStates, put_states_back
from tunecompile.integrations.deepspeed import gathered
from tunecompile.integrations.fsdp import unit
from tunecompile.integrations.kernel_functions import forks_in
from tunecompile.integrations.layer_host import LayerHost
from tunecompile.integrations.peft.reference import SwitchedOff
from tunecompile.integrations.peft.trace import separate_names
from tunecompile.notes import note
from tunecompile.runtime.layers.region import Region
from tunecompile.runtime.unpad.image_bounds import ImageBounds
from tunecompile.runtime.watch.module_watch import ModuleSnapshot

#: packages whose hooks put a layer's weights in place, and keep nothing that they see
_ENGINES = ("tunecompile.", "torch.distributed.", "accelerate.", "deepspeed.", "bitsandbytes.")


class PlacedLayer:
    """A layer, what is around it, and what is inside of it.

    Args:
        layer: as it is in the model.
        region: of its kind, which it tells of towers, gathered weights and classes.
    """

    def __init__(self, layer: nn.Module, region: Region):
        self.layer, self.region = layer, region
        self.owner: nn.Module | None = None  #: of its list of layers
        self.takes_ids = True  #: whether the owner is given token ids, and no states of several lengths
        self.inside: ModuleSnapshot | None = None
        self.switched_off = SwitchedOff(())  #: adapters, while a reference is scored
        self.hooks: Sequence[dict] = ()  #: dictionaries of hooks inside that the call finds
        #: where accelerate placed the layer, or how DeepSpeed or FSDP2 gathers it
        self.placement: LayerHost | None = None
        self.states: PackedStates | None = None  #: gives gathered weights their quantisation state
        self.images: ImageBounds | None = None  #: for a layer of a tower

    @property
    def device(self) -> torch.device | None:
        """Where the layer's weights are; None where accelerate keeps them elsewhere between calls."""
        return next((parameter.device for parameter in self.layer.parameters() if not parameter.is_meta), None)

    @property
    def gathers(self) -> bool:
        """Whether FSDP2 gathers the layer, and communicates around its call alone."""
        if self.inside is None:
            self.look_around()
        return self.placement is not None and self.placement.alone

    def look_around(self) -> None:
        """At the first step, when adapters are in place and devices are chosen."""
        self.placement = place(self.layer) or gathered(self.layer) or unit(self.layer)
        self.states = put_states_back(self.layer)
        self.images = ImageBounds.of(self.layer)
        if self.region.in_tower is None:
            self.region.in_tower = self.owner is not None and bool(forks_in(self.owner))
        replays = self.region.replays
        if replays is not None and any(map(sharded, self.layer.parameters())):
            # gathered weights lie elsewhere at every call; and a recorded collective would wait for all ranks
            if next(self.layer.parameters()).device.type == replays.device:
                replays.failures.append(note("no-cuda-graph", detail=note("weights-of-several-processes")))
            self.region.replays = None
        self._look_inside()

    def look_anew(self) -> None:
        """Once more, where that was done before the first training step."""
        if self.inside is not None:
            self.release()
            self.look_around()

    def _look_inside(self) -> None:
        """At its modules, as they are from now on."""
        separate_names(self.layer)
        self.inside, self.switched_off = ModuleSnapshot(self.layer), SwitchedOff.of(self.layer)
        self.region.classes.add(self.layer.modules())

    def follow_modules(self) -> bool:
        """Adapters may have come into the layer, and hooks with them.

        Returns:
            Whether hooks were found that may have been there for some steps.
        """
        if self.inside is None or not self.inside.changed:
            return False
        late = self.inside.late
        self._look_inside()
        return late

    @property
    def stays(self) -> bool:
        """Whether the layer's weights are its own (FSDP1 takes them away), are where they are, and this process's
        alone.
        """
        if self.inside is None:
            self.look_around()
        parameters = list(self.layer.parameters())
        return (
            bool(parameters)
            and (self.placement is None or self.placement.weights_stay)
            and not any(map(sharded, parameters))
        )

    def release(self) -> None:
        """Undo what `look_around` did to the layer."""
        if self.placement is not None:
            self.placement.release()
        if self.states is not None:
            self.states.hook.remove()
        if self.inside is not None:
            output_capturing.give_back(self.inside.hooks)

    def hooked(self) -> tuple:
        """The code of all hooks that are called inside. Dynamo traces those it finds, without a guard against later
        ones.
        """
        found = (*global_hooks(), *self.hooks)
        output_capturing.replace(found)
        return tuple(getattr(hook, "__code__", type(hook)) for hooks in found for hook in hooks.values())

    @property
    def watched(self) -> bool:
        """Whether a hook sees values inside the layer, and may keep them. Hooks of engines do not."""
        return self.inside.collected or any(
            not is_of(hook, _ENGINES) for hooks in (*global_hooks(), *self.inside.hooks) for hook in hooks.values()
        )
