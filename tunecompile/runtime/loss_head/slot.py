"""What stands in a head's place in a training step, and what it knows of the steps before."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.cuda import start_copy_to_host
from tunecompile._torch.distributed import fsdp_groups
from tunecompile._torch.modules import call_original, hooked
from tunecompile.compiler.pass_manager import MatchCount
from tunecompile.integrations.accelerate import place
from tunecompile.integrations.deepspeed import gathered
from tunecompile.integrations.fsdp import held
from tunecompile.integrations.layer_host import LayerHost
from tunecompile.integrations.loss_caller import labels_are_given
from tunecompile.notes import KINDS, Note, note
from tunecompile.runtime.loss_head.deferred import lazily
from tunecompile.runtime.loss_head.linear_head import HeadTracer, LinearHead, NotLinear
from tunecompile.runtime.loss_head.logits import Logits
from tunecompile.runtime.step.state import Step
from tunecompile.runtime.watch.module_watch import ClassWatch

log = logging.getLogger("tunecompile")
SPARSE = 0.9  #: with a smaller share of labelled rows, finding them costs less than computing the others


@dataclass
class Labelled:
    """Which rows have a label. Finding them waits for the device, so that is done only where the last step's share,
    which was copied without waiting, says that it pays."""

    share: float = 1.0
    pending: tuple[Tensor, Any, int] | None = None  #: count in pinned memory, the event after its copy, rows

    def rows(self, target: Tensor, ignore_index: int) -> Tensor | None:
        """Their indices; None: take all. (On a CPU the op itself skips the others.)"""
        if not target.is_cuda or not target.numel() or torch.cuda.is_current_stream_capturing():
            return None
        if self.pending is not None and self.pending[1].query():
            self.share = self.pending[0].item() / self.pending[2]
            self.pending = None
        labelled = target != ignore_index
        if self.share < SPARSE:
            found = labelled.nonzero().flatten()
            self.share = found.numel() / target.numel()
            return found
        if self.pending is None:
            self.pending = *start_copy_to_host(labelled.sum()), target.numel()
        return None


@dataclass
class Head:
    """A head whose logits are deferred, and the tally of what became of them."""

    module: nn.Module
    tally: MatchCount
    padded: Callable[[], bool] = lambda: False  #: whether the hidden states it is called with are zero at padding
    #: told when such logits are read where their padding may matter. It takes the hidden states and the autocast dtype
    #: of the head's call, and returns the same ones with what stands at padding; None where they are not known any more
    read: Callable[[Tensor, torch.dtype | None], Tensor | None] = lambda hidden, autocast: None
    #: the same of an evaluation's logits
    read_evaluated: Callable[[Tensor, torch.dtype | None], Tensor | None] = lambda hidden, autocast: None
    looked_at: Callable[[], bool] = lambda: (
        True
    )  #: whether the labels of a loss that is computed now are known to leave padding out
    attempt: Callable[[Callable[[], Tensor]], Tensor] = lambda call: call()  #: again, with less, where memory runs out
    #: what a call with these hidden states would compute now, None where that is as it was; `NotLinear` where it is no
    #: product
    product: Callable[[Tensor], LinearHead | None] = lambda hidden: None
    labelled: Labelled = field(default_factory=Labelled)
    labelled_evaluated: Labelled = field(default_factory=Labelled)  #: of evaluations, whose labels are others
    gathered: LayerHost | None = None  #: what has its weight gathered while a loss is computed
    scored: weakref.ref | None = None  #: the hidden states of the last loss
    at_once: bool = False  #: whether logits were read when the weights had changed, and are computed at once since

    def note_loss_of(self, hidden: Tensor) -> None:
        """Remember that a loss of these hidden states' logits was computed."""
        self.scored = weakref.ref(hidden)

    def has_loss_of(self, hidden: Tensor) -> bool:
        return self.scored is not None and self.scored() is hidden

    def logits(self, hidden: Tensor, autocast: torch.dtype | None, called: LinearHead) -> Tensor:
        """Apply the head as it was at its call.

        Args:
            hidden: the hidden states.
            autocast: the dtype of the call's autocast; None for none.
            called: what the call was to compute. Meanwhile the module may have another weight, or another adapter.
        """
        with torch.autocast(hidden.device.type, dtype=autocast, enabled=autocast is not None):
            return call_original(self.module, hidden) if self._is_still(called, hidden) else called(hidden)

    def _is_still(self, called: LinearHead, hidden: Tensor) -> bool:
        """Whether the module computes now what a call was to compute."""
        try:
            now = self.product(hidden)
        except NotLinear:
            return False
        return now is None or now.is_like(called)

    def now(self, product: LinearHead) -> LinearHead:
        """The same with the weight that is there now: what was there before is another tensor."""
        return product if self.gathered is None else replace(product, weight=self.module.weight, bias=self.module.bias)

    def try_alone(self, call: Callable[[], Tensor]) -> Tensor:
        """`attempt`, but where the head's hooks are called, too: what they send other processes expect once."""
        return self.attempt(call) if self.gathered is None else call()

    def read_late(self) -> None:
        """Logits are read that can no longer be made: what is made instead is told, and later steps do not wait."""
        if not self.at_once:
            self.at_once = True
            self.refuse(note("logits-read-late"))
            log.warning("tunecompile: %s. %s", note("logits-read-late"), KINDS["logits-read-late"].mend)

    def refuse(self, reason: Note) -> None:
        if reason not in self.tally.refused:
            self.tally.refused.append(reason)


def defer(head: Head, hidden: Tensor, product: LinearHead, evaluated: bool = False) -> Tensor:
    """Return the head's output, deferred; `evaluated`: it is of an evaluation."""
    meta = torch.empty((*hidden.shape[:-1], product.vocabulary), dtype=product.dtype, device="meta")
    trained = torch.is_grad_enabled() and (
        hidden.requires_grad or any(p.requires_grad for p in head.module.parameters())
    )
    product = replace(product, state=product.state_now())
    return lazily(Logits(head, hidden, product, _autocast(hidden), meta, trained, head.padded(), evaluated=evaluated))


def _autocast(hidden: Tensor) -> torch.dtype | None:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class HeadSlot:
    """What stands in the head's `_compiled_call_impl`.

    `called` tells whether a training step ever did: trainers may compute the loss from the head's weight by themselves.
    """

    def __init__(self, step: Step, head: Head, passes: tuple = ()):
        self.step, self.head, self.called, self.placed = step, head, False, False
        self.passes, self.classes = passes, ClassWatch()
        self.tracers: dict[int, HeadTracer] = {}  #: by the version of the classes
        self.placement: LayerHost | None = None
        head.product = self._product_now

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.head.module
        if (
            not self.called and torch.is_grad_enabled() and (module.training or self.step.active)
        ):  # not by `generate` between steps
            self.called = True
            if self.step.early:  # engines take the head when the training begins
                self.release()
                self.placed = False
            self._look_around()
        if self.step.replaced is not None:
            self.head.refuse(note("head-eager", detail=note("function-replaced", self.step.replaced)))
            return self._real(*args, **kwargs)
        deferred = self._trains() if torch.is_grad_enabled() else self._scores()
        if not deferred or len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return self._real(*args, **kwargs)
        if self.placement is None:
            return self._deferred(*args)
        if self.placement.refused:
            self.head.refuse(note("head-eager", detail=self.placement.refused))
            return call_original(module, *args)
        if self.placement.gathers_for_loss:
            return self._gathered_later(args[0], self.placement)
        return self.placement.call(lambda args, _: self._deferred(*args), args, kwargs)

    def _real(self, *args: Any, **kwargs: Any) -> Any:
        """The head's own output. Logits of a forward without gradients are anybody's, those at padding, too."""
        if self.step.scoring and not torch.is_grad_enabled() and self.head.padded() and isinstance(args[0], Tensor):
            read = self.head.read_evaluated if self.step.evaluates else self.head.read
            whole = read(args[0], _autocast(args[0]))
            args = args if whole is None else (whole, *args[1:])
        return call_original(self.head.module, *args, **kwargs)

    def _trains(self) -> bool:
        return self.step.active and not self.head.at_once

    def _look_around(self) -> None:
        """Once, when the head is where it will be trained."""
        if not self.placed:
            self.placed, module = True, self.head.module
            self.placement = place(module) or gathered(module) or held(module)

    def _scores(self) -> bool:
        """Whether logits of a reference or an old policy wait for the log-probabilities that are taken of them.

        Nobody knows when: so only where the head stays what it is, a frozen linear without adapters to switch. Those of
        an evaluation wait for its loss, as a training step's do.
        """
        module = self.head.module
        if self.step.evaluates:
            self._look_around()
            return self.placement is None and not self.head.at_once
        if not self.step.scoring or self.head.padded() or not _is_plain(module) or hooked(module):
            return False
        if any(parameter.requires_grad for parameter in module.parameters()):
            return False
        self._look_around()
        return self.placement is None

    def release(self) -> None:
        if self.placement is not None:
            self.placement.release()
            self.placement = None

    def _gathered_later(self, hidden: Tensor, placement: LayerHost) -> Tensor:
        """The deferred output, with the weight gathered for the loss, by the head's own hooks, instead of now.

        The loss has to be computed before the model's forward ends: its logits then pass through other hooks.
        """
        why = (
            note("model-without-loss")
            if not labels_are_given()
            else note("head-no-linear")
            if not _is_plain(self.head.module)
            else note("head-with-other-hooks")
            if placement.has_other_hooks()
            else None
        )
        if why:
            gathers = note("head-gathered", placement.engine, why)
            self.head.refuse(note("head-eager", detail=gathers))
            return call_original(self.head.module, hidden)
        self.head.gathered = placement
        return self._defer(hidden, self._plain(hidden))

    def _deferred(self, hidden: Tensor) -> Tensor:
        try:
            product = self._product(hidden)
        except NotLinear as other:
            self.head.refuse(note("head-is", type(self.head.module).__name__, other.reason))
            return self._real(hidden)
        return self._defer(hidden, product)

    def _defer(self, hidden: Tensor, product: LinearHead) -> Tensor:
        for budget in self.step.budgets if self.step.active else ():
            budget.settle()
        return defer(self.head, hidden, product, self.step.evaluates and not torch.is_grad_enabled())

    def _product(self, hidden: Tensor) -> LinearHead:
        module = self.head.module
        if hooked(module):
            raise NotLinear(note("with-hooks"))
        if _is_plain(module):
            return self._plain(hidden)
        self.classes.add(module.modules())
        version = self.classes.look()
        if version not in self.tracers:
            self.tracers[version] = HeadTracer(module, self.passes)
        return self.tracers[version].product(hidden)

    def _product_now(self, hidden: Tensor) -> LinearHead | None:
        """None where an engine holds the weight, which is another tensor in each call."""
        return None if self.placement is not None else self._product(hidden)

    def _plain(self, hidden: Tensor) -> LinearHead:
        module = self.head.module
        host = self.placement or LayerHost(module)
        dtype = host.product_dtype(hidden)
        return LinearHead(module.weight, module.bias, _autocast(hidden) or dtype)


def _is_plain(module: nn.Module) -> bool:
    kinds = (
        type(module),
        *(type(module).__bases__ if fsdp_groups(module) is not None else ()),
    )  # `fully_shard` makes a class of its own and the module's
    return nn.Linear in kinds and "forward" not in vars(module)
