"""Training health: figures of each step, read a step late without a wait, and lines that say what to do."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tunecompile._torch.cuda import start_copy_to_host
from tunecompile.notes import KINDS, Note, note
from tunecompile.runtime.model_state import is_optimized, state_of
from tunecompile.runtime.parts import StepTelemetry
from tunecompile.runtime.telemetry import describe
from tunecompile.trainers.door import held_by
from tunecompile.trainers.experts import ExpertUse
from tunecompile.trainers.health import Judge
from tunecompile.trainers.origin import origin

log = logging.getLogger(__name__)

EXPERTS_EVERY, EXPERTS_AT = 5, 100  #: steps between two looks at experts' gradients, and step at which they are judged
ADAPTERS_AT = 20  #: step at which adapters must have learned something
PEAK_EVERY = 20  #: steps between two looks at the peak of memory


def watch(model: nn.Module) -> Watcher:
    """Watch a training's health from now on, in any loop: each line of the log says what is wrong, and what to do.

    Seen are losses and gradients that are not finite, with the op that made them first, spikes and oscillation of the
    loss, norms of gradients (over 1e4, or a jump over their running spread), adapters that learn nothing, experts that
    get no token, a data loader that the device waits for, and a peak of memory near the budget of `optimize`. The lines
    are shown by `tunecompile monitor`, too, if the model is optimized.

        watcher = tunecompile.watch(model)      # before the loop; the model may be optimized or not
        ...
        print(watcher.findings)

    Figures leave the device in small copies, which are read when they have arrived: no step waits. The loss is what the
    model returns as `loss`, or as its only number. Steps are those of any optimizer of torch's over the model's
    parameters. Where a loss is not finite, the forward pass is repeated once, eagerly.

    Args:
        model: that is trained.

    Returns:
        A `Watcher`; its `stop()` ends it.
    """
    return Watcher(model)


@dataclass
class _Figures:
    """Of one step, under way to the host."""

    step: int
    host: Tensor  #: loss, norm of all gradients, number of adapters that learn nothing, number of idle experts
    arrived: Callable[[], bool]
    norms: Tensor  #: of each gradient, on the device
    dead: Tensor | None
    idle: Tensor | None
    has_loss: bool


class Watcher:
    """What `watch` returns."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.findings: list[Note] = []  #: all lines so far
        self.steps = 0
        self._judge = Judge()
        self._coming: deque[_Figures] = deque(maxlen=8)
        self._batch: tuple[tuple, dict] = (), {}  #: of the last call in training
        self._loss: Tensor | None = None
        self._early: tuple[Tensor, Callable[[], bool]] | None = None  #: the loss, on its way to the host
        self._experts = ExpertUse(model)
        self._own: dict[int, bool] = {}  #: by optimizer
        self._ended = self._gap = 0.0
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._keep_loss),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def stop(self) -> None:
        """Watch no more. Figures that have arrived are still read."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._read()
        self._batch = (), {}

    def _begin(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if model.training:
            self._batch = args, kwargs
        if self._ended and not self._gap and model.training:
            last = self._coming[-1] if self._coming else None
            self._gap = (time.perf_counter() - self._ended) if last is None or last.arrived() else -1.0

    def _keep_loss(self, model: nn.Module, args: tuple, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", output)
        if model.training and isinstance(loss, Tensor) and loss.numel() == 1:
            self._loss = loss.detach().reshape(())
            self._early = _to_host(self._loss)

    def _is_own(self, optimizer: Optimizer) -> bool:
        if id(optimizer) not in self._own:
            held = held_by(optimizer)
            self._own[id(optimizer)] = any(id(parameter) in held for parameter in self.model.parameters())
        return self._own[id(optimizer)]

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if not self._is_own(optimizer):
            return
        self._read()
        self.steps += 1
        if self._early is not None and self._early[1]():  # before this step makes weights of what is not finite
            self._tell(self._judge.finite(self.steps, float(self._early[0])))
        self._early = None
        named = self._with_gradients()
        if not named:
            return
        grads = [_local(parameter.grad) for _, parameter in named]
        place = grads[0].device
        norms = torch.stack([norm.to(place, torch.float32) for norm in torch._foreach_norm(grads)])
        dead = self._dead(named, norms) if self.steps == ADAPTERS_AT else None
        if self.steps <= EXPERTS_AT and self.steps % EXPERTS_EVERY == 0:
            self._experts.look()
        idle = self._experts.idle() if self.steps == EXPERTS_AT else None
        loss = self._loss
        row = [
            norms.new_zeros(()) if loss is None else loss.to(place, torch.float32),
            torch.linalg.vector_norm(norms),
            norms.new_zeros(()) if dead is None else dead.sum().float(),
            norms.new_zeros(()) if idle is None else idle.sum().to(place, torch.float32),
        ]
        host, arrived = _to_host(torch.stack(row))
        self._coming.append(_Figures(self.steps, host, arrived, norms, dead, idle, loss is not None))
        self._loss = None

    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if not self._is_own(optimizer):
            return
        now = time.perf_counter()
        if self._ended and self._gap:
            share = max(0.0, self._gap) / (now - self._ended)
            self._tell(self._judge.wait(self.steps, share))
        self._ended, self._gap = now, 0.0
        if self.steps % PEAK_EVERY == 0 and is_optimized(self.model):
            state = state_of(self.model)
            known = describe(state.base(), state.memory, state.step.budget)
            if known["budget"] and known["measured_peak"]:
                self._tell(self._judge.peak(self.steps, known["measured_peak"] / known["budget"]))

    def _with_gradients(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and not parameter.grad.is_sparse
        ]

    def _dead(self, named: list[tuple[str, nn.Parameter]], norms: Tensor) -> Tensor:
        """Which of the gradients are zero, at a B of an adapter that is zero."""
        weights = [parameter.detach() if "lora_B" in name else None for name, parameter in named]
        zero = [
            torch.ones((), dtype=torch.bool, device=norms.device).logical_and(~_local(weight).any().to(norms.device))
            if weight is not None
            else torch.zeros((), dtype=torch.bool, device=norms.device)
            for weight in weights
        ]
        return torch.stack(zero) & (norms == 0)

    def _read(self) -> None:
        while self._coming and self._coming[0].arrived():
            figures = self._coming.popleft()
            loss, norm, dead, idle = figures.host.tolist()
            found = self._judge.loss(figures.step, loss) if figures.has_loss else []
            found += self._judge.norm(figures.step, norm)
            if not math.isfinite(norm):
                found.append(note("gradients-not-finite", self._where(figures), step=figures.step))
            if dead and figures.dead is not None:
                names = [name for (name, _), is_dead in zip(self._with_gradients(), figures.dead.tolist()) if is_dead]
                found.append(note("dead-adapters", names[0] if names else "", count=int(dead), step=figures.step))
            if idle and figures.idle is not None:
                first = next(name for name, count in zip(self._experts.names(), figures.idle.tolist()) if count)
                found.append(note("idle-experts", first, count=int(idle), looks=self._experts.looks))
            self._tell(found, figures.step)

    def _where(self, figures: _Figures) -> str:
        """The last of the parameters, in the order of the forward pass, whose gradient is not finite."""
        finite = torch.isfinite(figures.norms).tolist()
        names = [name for name, _ in self.model.named_parameters() if _.requires_grad]
        if len(names) != len(finite) or not any(finite):
            return "the loss, or the last layer: no gradient is finite" if not any(finite) else "some layer"
        return next(name for name, right in zip(reversed(names), reversed(finite)) if not right)

    def _tell(self, found: list[Note], step: int | None = None) -> None:
        new = self._judge.new(self.steps if step is None else step, found)
        if any(each.code == "loss-not-finite" for each in new):
            made = origin(self.model, *self._batch, self.steps)
            new += [made] if made is not None else []
        for each in new:
            self.findings.append(each)
            log.warning("tunecompile: %s. %s", each, KINDS[each.code].mend)
        if new and is_optimized(self.model):
            state_of(self.model).part(StepTelemetry).tell(new)


def _local(tensor: Any) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _to_host(vector: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """A copy on the host, and whether it has arrived."""
    if not vector.is_cuda:
        return vector.cpu(), lambda: True
    host, copied = start_copy_to_host(vector)
    return host, copied.query
