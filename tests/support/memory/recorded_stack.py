"""Layers behind the recorder of CUDA graphs as compiled ones are, and the same layers without it."""

from __future__ import annotations

import torch

from tests.support.memory.cpu_recorder import CpuRecorder
from tunecompile.runtime.cuda_graphs.replay import GraphReplays


def forward(given):
    """What it gives, and what the backward needs: two values of its own, its input, its weight and a table."""
    weight, table, x, _ = given
    inner = torch.tanh(x * weight)
    return [inner * inner * table + x, inner, 1 - inner * inner, x, weight, table]


def backward(given):
    inner, slope, x, weight, table, gradient = given
    gradient_inside = gradient * table * 2 * inner * slope
    return [gradient + gradient_inside * weight, (gradient_inside * x).sum(0)]


class Compiled(torch.autograd.Function):
    """A layer as AOTAutograd calls it."""

    @staticmethod
    def forward(ctx, graph, weight, table, x):
        out, *saved = graph.forward([weight, table, x, x.shape[0]])
        ctx.graph = graph
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx, gradient):
        to_input, to_weight = ctx.graph.backward([*ctx.saved_tensors, gradient.contiguous()])
        return None, to_weight, None, to_input


class Graph:
    """One compiled graph."""

    def __init__(self, replays):
        self.forward, self.backward = replays.forward(forward, handed=1, parameters=[0]), replays.backward(backward)


class RecordedStack:
    """Layers, some of which follow one plan, some another."""

    def __init__(self, layers=4, plans=1, width=3):
        self.replays = GraphReplays(CpuRecorder())
        self.plans = [Graph(self.replays) for _ in range(plans)]
        made = torch.Generator().manual_seed(0)
        self.weights = [torch.rand(width, generator=made).add(0.5).requires_grad_() for _ in range(layers)]
        self.table = torch.rand(width, generator=made)  #: one object for all calls, which is no parameter
        self.plan_of = [layer * plans // layers for layer in range(layers)]

    def layer(self, layer, x, plain=False):
        weight = self.weights[layer]
        if plain:
            return torch.tanh(x * weight) ** 2 * self.table + x
        return Compiled.apply(self.plans[self.plan_of[layer]], weight, self.table, x)

    def run(self, order, x, plain=False):
        for layer in order:
            x = self.layer(layer, x, plain)
        return x
