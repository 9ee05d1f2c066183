"""Trains a tiny model in processes whose torch lacks one private name each, and prints what came of it, a line of JSON each.

    python without_names.py < request.json    # {"executor": ..., "load": [names to import first], "lost": [[names], ...]}

Importing torch takes seconds, so one process does that, and forks for each case. The name is taken away where `tunecompile` looks it up: torch
itself goes on using it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pkgutil
import sys
import traceback

import torch
from torch import nn

resolve = pkgutil.resolve_name


class Layer(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(width), nn.Linear(width, 32), nn.Linear(width, 32)
        self.down = nn.Linear(32, width)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def take_away(names: list[str]) -> None:
    def without(name: str):
        if any(name == lost or name.startswith(f"{lost}.") for lost in names):
            raise ImportError(f"{name} was taken away")
        return resolve(name)

    pkgutil.resolve_name = without


def train(names: list[str], executor: str) -> dict:
    take_away(names)
    import tunecompile

    torch.manual_seed(0)
    reference, x = Model(), torch.randn(2, 8, 16)
    model = tunecompile.optimize(copy.deepcopy(reference), executor=executor)
    losses = []
    for each in (reference, model):
        for _ in range(2):
            loss = each(x)
            loss.backward()
        losses.append(loss.item())
    wrong = max((a.grad - b.grad).abs().max().item() for a, b in zip(model.parameters(), reference.parameters()))
    report = tunecompile.report(model)
    tunecompile.restore(model)
    return {
        "loss": abs(losses[0] - losses[1]),
        "gradients": wrong,
        "compiles": report.compiles,
        "notes": report.notes,
        "matches": sum(match.rewritten for match in report.matches),
    }


def main() -> None:
    request = json.load(sys.stdin)
    torch.set_num_threads(1)
    for name in request["load"]:
        with contextlib.suppress(ImportError, AttributeError):
            resolve(name)
    for names in request["lost"]:
        sys.stdout.flush()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            told = train(names, request["executor"])
        except BaseException:
            told = {"error": traceback.format_exc()}
        print(json.dumps({"lost": names, **told}), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
