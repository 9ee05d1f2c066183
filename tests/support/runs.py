"""Steps of a model beside eager's: what is run, and what the report says behind them. A row of a table is a `Run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_close
from tests.support.models.pairs import attending, pair
from tests.support.notes import find, has
from tests.support.reports import as_documents, flattened, told_apart

EXACT = {"loss": 1e-6, "limit": 1e-6}  #: of models in fp64, whose norms and losses are in fp32


@dataclass(frozen=True)
class Run:
    """A model, its batches, and what its report says behind them.

    change: of the model.   patched: of the process.   loss: of a model and a batch.   plain: batches of the reference.
    removed, apart, whole: how many batches ran without padding, packed ones without a mask, and whole ones as documents.
    kept: why others did not.   said: the count of a note, or its subject.   provider: of an op in each kind of layer.
    """

    change: Callable[[nn.Module], object] = lambda model: None
    batches: Sequence[dict] | Callable[[], Sequence[dict]] = (padded(),)
    removed: int = 0
    apart: int = 0
    whole: int | None = None
    kept: str | None = None
    said: Mapping[str, int | str] = field(default_factory=dict)
    build: Callable[[], nn.Module] = attending
    patched: Callable[[pytest.MonkeyPatch], object] = lambda patch: None
    loss: Callable[[nn.Module, dict], torch.Tensor] = zoo.by_labels
    limits: Mapping[str, float] = field(default_factory=lambda: {"loss": 1e-5, "limit": 1e-4})
    plain: Sequence[dict] | None = None
    compiles: int | None = None
    provider: str | None = None

    def check(self, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
        """The optimized model, after all of it."""
        self.patched(monkeypatch)

        def build() -> nn.Module:
            torch.manual_seed(0)
            model = self.build()
            self.change(model)
            return model

        batches = self.batches() if callable(self.batches) else self.batches
        model, reference = pair(build)
        for batch, other in zip(batches, self.plain or batches, strict=True):
            steps = [zoo.step(m, dict(each), loss=self.loss) for m, each in ((model, batch), (reference, other))]
            assert_close(*map(unwrapped, steps), **self.limits)
        report = tunecompile.report(model)
        assert (flattened(model), told_apart(model)) == (self.removed, self.apart), report
        assert self.whole is None or as_documents(model) == self.whole, report
        kept = find(report, "padding-kept", "packing-kept", reason=self.kept or "")
        assert bool(kept) is bool(self.kept), report
        for code, told in self.said.items():
            assert has(report, code, **{"count" if isinstance(told, int) else "subject": told}), report
        layers = [region for region in report.regions if not region.name.endswith("Norm")]
        assert max(region.compiles for region in layers) == self.compiles or self.compiles is None, report
        assert all(each.compiles <= 2 and not each.recompiles for each in layers) or self.kept or self.compiles, report
        assert self.provider is None or all(region.providers[self.provider] for region in layers), report
        return model


def unwrapped(step: tuple) -> tuple:
    loss, gradients = step
    return loss, {name.replace("_checkpoint_wrapped_module.", ""): gradient for name, gradient in gradients.items()}


def cases(quick: Mapping[str, Run], slow: Mapping[str, Run]) -> pytest.MarkDecorator:
    """A test of each, of the slow ones in `make test-all` alone."""
    marked = [pytest.param(run, id=name, marks=pytest.mark.slow) for name, run in slow.items()]
    return pytest.mark.parametrize("run", [*(pytest.param(run, id=name) for name, run in quick.items()), *marked])


def checkpoints(*path: str, reentrant: bool) -> Callable[[nn.Module], None]:
    """Around modules, by code that might read what stands at padding. They do not know that they are repeated."""

    def change(model: nn.Module) -> None:
        if reentrant:
            model.enable_input_require_grads()
        kinds: dict[type, type] = {}
        for name in path:
            module = model.get_submodule(name)
            kind = type(module)

            def call(self, first=None, *args, kind=kind, **kwargs):
                given = () if first is None else (first,)
                return checkpoint(lambda *x: kind.__call__(self, *x, *args, **kwargs), *given, use_reentrant=reentrant)

            members = {"__module__": kind.__module__, "__call__": call}
            module.__class__ = kinds.setdefault(kind, type(kind.__name__, (kind,), members))

    return change
