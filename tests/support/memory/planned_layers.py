"""Four layers and the planner of their device: candidates and bytes are given, no layer runs."""

from __future__ import annotations

import types

import torch
from torch import nn

from tunecompile.planner.candidates import CandidateCost
from tunecompile.planner.cost_model import Work
from tunecompile.planner.solver import KEEP, RECOMPUTE, Plan
from tunecompile.planner.step_plan import RegionCandidates
from tunecompile.runtime.memory.accounting import MemoryAccounting
from tunecompile.runtime.memory.budget import RuntimePlanner

HALF = Plan(frozenset({0}))
ROWS = (
    CandidateCost(KEEP, 5000, 0, 5, 10, Work(100), Work(200)),
    CandidateCost(HALF, 2000, 0, 5, 30, Work(100), Work(250)),
    CandidateCost(RECOMPUTE, 1000, 0, 5, 45, Work(100), Work(300)),
)
TOKENS, LAYERS = 80, 4
ROOMY, TIGHT = 1 << 20, 10_000  #: bytes for all of them: more than they would keep, and half of it


class Gauge:
    def __init__(self):
        self.now = self.most = self.released = 0
        self.free = 1 << 40

    def allocated(self):
        return self.now

    def peak(self):
        return self.most, self.most

    def release(self):
        self.released += 1

    def failures(self):
        return 0

    def outside(self):
        return 0

    def available(self):
        return self.free

    total = available


class Region:
    name = "layers"


def planner(room, regions=1, surveyed=True, **options):
    """Of four layers that would keep 20,000 bytes."""
    kinds = [Region() for _ in range(regions)]
    slots = [
        types.SimpleNamespace(
            region=kinds[place * regions // LAYERS], layer=nn.Linear(1, 1), place=place, checkpoint=False, window=0
        )
        for place in range(LAYERS)
    ]
    model = nn.ModuleList(slot.layer for slot in slots)
    memory = MemoryAccounting(room, model, Gauge(), torch.device("cpu"), slots, (), **options)
    made = RuntimePlanner(memory)
    for kind in kinds[: regions if surveyed is True else surveyed]:
        made.surveys.candidates[id(kind)] = RegionCandidates(ROWS, TOKENS, whole=True, passed=10)
    return made


def step(made, tokens=TOKENS):
    """A step's beginning, and the plan of its first layer."""
    made.begin()
    return made.plan_for(made.layers[0], "kind", tokens)[0]


def plans(made):
    return [option.plan for option in made.options.values()]
