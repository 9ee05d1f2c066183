"""The net that verifies a training step of a small model whose layers compute an example."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tunecompile import passes as own_passes
from tunecompile.compiler.pass_manager import Pass
from tunecompile.compiler.plugins import pipeline
from tunecompile.runtime.attach import attach
from tunecompile.runtime.model_state import Settings, state_of
from tunecompile.verification.pass_examples import Answer, Example
from tunecompile.verification.verify import verify


class _Layer(nn.Module):
    """A layer that computes an example, with the example's tensors as its weights."""

    def __init__(self, example: Example):
        super().__init__()
        args = example.args(torch.float32)
        self.function = example.function
        self.given = [None if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
        weights = [arg for arg, given in zip(args, self.given) if given is None]
        self.weights = nn.ParameterList([nn.Parameter(arg.detach().clone(), arg.requires_grad) for arg in weights])

    def forward(self, x: Tensor) -> Tensor:
        """The input plus the means of the example's results on scaled weights."""
        weights = iter(self.weights)
        made = self.function(*[next(weights) * x if given is None else given for given in self.given])
        return x + sum(
            value.float().mean()
            for value in tree_leaves(made)
            if isinstance(value, Tensor) and value.is_floating_point()
        )


class _Model(nn.Module):
    """Two such layers and a loss."""

    def __init__(self, example: Example):
        super().__init__()
        self.layers = nn.ModuleList(_Layer(example) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """The loss, a scalar."""
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def training_step(passes: Sequence[Pass], example: Example) -> Iterator[Answer]:
    """Whether the example is found in a model of two layers, and one training step of it passes `verify`."""
    own = {p.name for p in passes}
    others = (p for p in pipeline(own_passes.PIPELINE) if p.name not in own)
    model = attach(_Model(example).train(), Settings((*passes, *others), executor="eager"))
    state = state_of(model)
    result = verify(model, {"x": torch.ones(1, device="cpu")}, loss=lambda model, batch: model(**batch))
    found = {tally.family: tally.rewritten for tally in state.matches()}
    if not result.faults:  # a pass at fault is switched off by now
        yield (
            "found in a model's layers",
            any(found.get(p.name) for p in passes),
            ", ".join(f"{name} {count}" for name, count in found.items() if count),
        )
    yield "a training step is verified", result.passed, result.summary()
