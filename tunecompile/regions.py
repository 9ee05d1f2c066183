"""What is compiled: the repeated layers of a model, each in place, with one compiled variant serving all of them.

A region is compiled through the module's own `_compiled_call_impl` slot (what `module.compile()` fills), so that the model object,
its class, parameters and state dict stay what they were, and hooks, PEFT, Trainer and DDP see the module they know.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import torch
from torch import nn

from tunecompile.backend import Backend, Executor
from tunecompile.pipeline import Pass


@dataclass(frozen=True)
class Layers:
    """The outermost list of repeated layers: its owner runs once a step, the members are the regions."""

    path: str
    owner: nn.Module
    members: tuple[nn.Module, ...]


def find_layers(model: nn.Module) -> list[Layers]:
    """The outermost `nn.ModuleList`s (or Sequentials) of at least two layers of one class that hold parameters.

    Lists inside a found layer (experts) are not regions. Lists of bare linears (several heads) are not layers.
    """
    found: list[Layers] = []

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            where = f"{path}.{name}" if path else name
            members = tuple(child.children())
            repeated = isinstance(child, (nn.ModuleList, nn.Sequential)) and len(members) >= 2
            if repeated and len({type(m) for m in members}) == 1 and all(next(m.children(), None) is not None for m in members):
                found.append(Layers(where, module if isinstance(child, nn.ModuleList) else child, members))
            else:
                visit(child, where)

    visit(model, "")
    return found


def structure(module: nn.Module) -> tuple:
    """What two layers must share to be one region: names and classes of all submodules."""
    return tuple((name, type(child)) for name, child in module.named_modules())


def _region(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return layer._call_impl(*args, **kwargs)


def _own_code(name: str) -> Callable:
    """A copy of `_region` with its own code object: Dynamo's cache, and its limit of eight graphs, sits on the code object."""
    code = _region.__code__.replace(co_name=name)
    return types.FunctionType(code, _region.__globals__, name)


@dataclass
class Region:
    """One compiled function for all layers of one structure; one variant for each plan."""

    name: str
    passes: Sequence[Pass]
    executor: Executor
    backends: dict[bool, Backend] = field(default_factory=dict)
    compiled: dict[bool, Callable] = field(default_factory=dict)

    def variant(self, checkpoint: bool) -> Callable:
        if checkpoint not in self.compiled:
            name = f"{self.name}_checkpointed" if checkpoint else self.name
            self.backends[checkpoint] = Backend(name, self.passes, self.executor, checkpoint)
            self.compiled[checkpoint] = torch.compile(_own_code(name), backend=self.backends[checkpoint])
        return self.compiled[checkpoint]


class Slot:
    """What stands in a layer's `_compiled_call_impl`: compiled in a training step, the layer as it was otherwise."""

    def __init__(self, step: "Any", layer: nn.Module, region: Region):
        self.step, self.layer, self.region = step, layer, region
        self.call = region.variant(False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.step.active:
            return self.call(self.layer, *args, **kwargs)
        return self.layer._call_impl(*args, **kwargs)
