"""A model whose code is made when a test says so, in this process: what the other process does, without its start."""

from __future__ import annotations

import difflib
import re
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch._inductor import codecache, compile_fx

import tunecompile
from tunecompile.compiler.background import child
from tunecompile.compiler.background.orders import Answer
from tunecompile.compiler.background.process import BackgroundCompiler, Job
from tunecompile.runtime import model_state
from tunecompile.runtime.background import waiting

WIDTH = 16


class Layer(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.inner, self.dropout = nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.nn.functional.dropout(self.inner(hidden), self.dropout)


class Stack(nn.Module):
    """Layers, and a sum of squares of all that they give."""

    def __init__(self, layers: int, dropout: float):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))
        self.last = torch.empty(0, device="cpu")  #: what the last layer gave

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        total = 0.0
        for layer in self.layers:
            hidden = layer(hidden)
            total = total + hidden.square().mean()
        self.last = hidden
        return total


def batch(rows: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 8, WIDTH, generator=torch.Generator().manual_seed(seed))


def stack(layers: int = 2, dropout: float = 0.0) -> Stack:
    torch.manual_seed(0)
    return Stack(layers, dropout).train()


class Later(BackgroundCompiler):
    """Answers orders when it is told to."""

    def start(self) -> None:
        self.orders: list[bytes] = getattr(self, "orders", [])

    def order(self, key: str, packed: bytes) -> Job:
        self.start()
        self.jobs.append(Job(key))
        self.orders.append(packed)
        return self.jobs[-1]

    def look(self) -> None:
        pass

    def deliver(self, error: str = "") -> None:
        """Answer all orders. error: in the place of code."""
        for job, packed in zip(self.jobs, self.orders):
            if job.answer is None:
                if not error:
                    child.fill(packed)
                job.answer = Answer(0.1, error)


class Generated:
    """How often this process generates code for a graph."""

    def __init__(self, monkeypatch) -> None:
        self.graphs, plain = 0, compile_fx.fx_codegen_and_compile

        def counting(*args, **kwargs):
            self.graphs += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", counting)


class Keys:
    """What both processes look for in Inductor's cache, and how the training's keys differ where code is not found."""

    def __init__(self, monkeypatch) -> None:
        monkeypatch.setenv("TORCH_LOGS", "+torch._inductor.codecache")  # the other process reads it when it starts
        self.looked: dict[str, list[str]] = {}
        plain = codecache.FxGraphCache.load_with_key

        def load_with_key(key, lines, *args, **kwargs):
            self.looked[key] = [part for line in lines for part in line.splitlines()]
            return plain(key, lines, *args, **kwargs)

        monkeypatch.setattr(codecache.FxGraphCache, "load_with_key", staticmethod(load_with_key))

    def differences(self) -> list[str]:
        """Of each key that the other process does not know, from the one that is most like it."""
        folders = Path(tempfile.gettempdir()).glob("tunecompile-background-*")
        logs = max(folders, key=lambda folder: folder.stat().st_mtime).glob("*.log")
        known = {key: lines for log in logs for key, lines in details_in(log.read_text("utf-8")).items()}
        found = []
        for key, lines in self.looked.items():
            if key not in known:
                changes = [[*difflib.unified_diff(each, lines, n=0, lineterm="")] for each in known.values()]
                found += min(changes, key=len, default=[key])
        return [line[:500] for line in found]


def details_in(log: str) -> dict[str, list[str]]:
    """What keys were made of, as torch logs it."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in log.splitlines():
        told = re.sub(r"^[VIWE]\d{4} .*?\] (\[\d+/\d+\] )?", "", line)
        if key := re.match(r"FX graph cache hash details for key (\w+):", told):
            lines = found.setdefault(key[1], [])
        elif told.startswith("fx graph cache"):
            lines = []
        else:
            lines.append(told)
    return found


def warming(model: nn.Module, monkeypatch, **options) -> Later:
    """Optimize a model, whose code comes from what is returned."""
    monkeypatch.setattr(model_state, "Background", lambda: waiting.Background(Later()))
    tunecompile.optimize(model, warmup="background", **options)
    return model._tunecompile.background.compiler


def step(model: nn.Module, given: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(Loss, gradients by name)."""
    model.zero_grad()
    loss = model(given)
    loss.backward()
    return loss.detach(), {name: each.grad.clone() for name, each in model.named_parameters()}
