"""The door of loops without a Trainer, under `tunecompile run`: an optimizer says which model is to be trained.

The model is the one that owns the optimizer's parameters, the same objects, wherever it is: in a script's variable, in
accelerate, in an engine's wrapper. Its outermost module counts, so that no model is optimized as a part of another, and
what the user or another door has optimized stays as it is.
"""

from __future__ import annotations

import gc
from collections import defaultdict

from torch import nn
from torch.optim import Optimizer

from tunecompile.runtime.model_state import is_optimized
from tunecompile.trainers.door import Door, held_by, options_of_run, trained

_door: list[Door] = []  #: of this process, once there is an optimizer


def optimizer_made(optimizer: Optimizer) -> None:
    """Optimize the models whose parameters an optimizer was made over."""
    if not _door:
        _door.append(Door(**(options_of_run() or {})))
    for root in roots(optimizer):
        if not any(is_optimized(part) for part in root.modules()):
            for model in trained(root):
                _door[0].optimize(model)


def roots(optimizer: Optimizer) -> list[nn.Module]:
    """The outermost modules that have some of the optimizer's parameters."""
    held = held_by(optimizer)
    gc.collect()  # wrappers that nobody has any more
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in vars(each)]
    parents = defaultdict(list)
    for module in modules:
        for child in module.children():
            parents[id(child)].append(module)
    ahead = [each for each in modules if any(id(parameter) in held for parameter in each._parameters.values())]
    seen: dict[int, nn.Module] = {}
    while ahead:
        module = ahead.pop()
        if id(module) not in seen:
            seen[id(module)] = module
            ahead += parents[id(module)]
    return [module for key, module in seen.items() if not parents[key]]
