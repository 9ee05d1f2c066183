"""Budgets, ranks and layers as recovery from a full device sees them: it runs on stand-ins, without a device."""

from __future__ import annotations

import types

import torch
from torch import nn

from tunecompile.runtime.memory.across_ranks import RankPlans
from tunecompile.runtime.memory.oom_recovery import Recovery
from tunecompile.runtime.watch.module_watch import ModuleSnapshot

MEMORY = "CUDA out of memory. Tried to allocate 2.00 KiB. GPU {} has a total capacity of 1.00 MiB"
PLAN = {"layers": 2, "recompute": [], "tiles": 1, "offload": False, "largest_stays": False}


class Budget:
    """A budget with so many smaller plans."""

    def __init__(self, index, smaller=1, tokens=100, peak=1000):
        self.device = torch.device("cuda", index)
        self.smaller, self.retreats, self.gave, self.made = smaller, [], [], 0
        self.failed, self.released, self.settled = False, 0, 0
        self.memory = types.SimpleNamespace(
            model=nn.Linear(1, 1),
            overflowed=self._overflowed,
            allowed=lambda: 5 << 20,
            surplus=0,
            gauge=types.SimpleNamespace(release=self._release),
            host_is_full=lambda nbytes: nbytes > 10,
        )
        choice = types.SimpleNamespace(peak=peak, options=[[types.SimpleNamespace(held=200)]])
        self.admitted = types.SimpleNamespace(choice=choice, tokens=tokens, resident=7 << 20, room=77)
        self.progress = types.SimpleNamespace(steps=9)
        self.layers, self.plans, self.tight = [types.SimpleNamespace(device=torch.device("cpu"))], 1, True

    def _overflowed(self):
        found, self.failed = self.failed, False
        return found

    def _release(self):
        self.released += 1

    def settle(self):
        self.settled += 1

    def retreat(self, missing):
        self.retreats.append(missing)
        self.made += bool(self.smaller)
        self.smaller, there = max(0, self.smaller - 1), self.smaller > 0
        return there

    def give_way(self, room):
        self.gave.append(room)
        return room < 50

    def plans_by_layer(self):
        return [{**PLAN, "layers": 2 + self.made}]


class Board:
    def __init__(self, ranks=1, news=()):
        self.ranks, self.rank, self.posted, self.coming, self.told = ranks, 0, [], list(news), []

    def post(self, **what):
        self.posted.append(what)

    def news(self):
        return [dict(zip(("rank", "room"), each)) for each in self.coming]

    def publish(self, key, plan):
        self.told.append(plan)

    def published(self, key):
        return {}


def layer(gathers=False, parameter=None):
    module = nn.Module()
    module.register_parameter("p", nn.Parameter(torch.zeros(1)) if parameter is None else parameter)
    return types.SimpleNamespace(gathers=gathers, layer=module, device=torch.device("cpu"))


def recovery(*budgets, slots=(), ranks=1, news=()):
    made = Recovery(types.SimpleNamespace(budgets=budgets), slots or [layer()])
    made.agreement = RankPlans(Board(ranks, news))
    return made


def failing(times, index=0, result="done"):
    """A part of the step that fails so often."""
    left = [times]

    def run():
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError(MEMORY.format(index))
        return result

    return run


class Repeated:
    """A layer's call whose gradients fail so often; it notes each time that its forward runs again."""

    def __init__(self, found, fails, repeatable=True):
        self.recovery, self.fails, self.repeatable = found, fails, repeatable
        self.slot = types.SimpleNamespace(budget=found.budgets[0])
        self.edges, self.repeats, self.seen = "the first graph", [], []

    def _repeat(self, given):
        self.repeats.append(given)
        self.edges = f"graph {len(self.repeats)}"

    def _gradients(self, grads):
        self.seen.append(self.edges)
        if len(self.seen) <= self.fails:
            raise torch.OutOfMemoryError(MEMORY.format(0))
        return grads


def slot_of(budget, compiled, **more):
    """The slot of a layer that this budget plans for."""
    given = {**vars(layer()), "budget": budget, "watched": False, "inside": ModuleSnapshot(nn.Linear(1, 1)), **more}
    return types.SimpleNamespace(**given, compiled=lambda args, kwargs: compiled())
