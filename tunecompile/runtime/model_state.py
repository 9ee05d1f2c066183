"""Everything that `optimize` hangs into one model: regions, slots, hooks, budget, and what they tell."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from tunecompile._torch.autograd import others_trace
from tunecompile._torch.modules import empty, fill, slot_of
from tunecompile.compiler.backend import Executor
from tunecompile.compiler.pass_manager import MatchCount
from tunecompile.errors import CannotVerify, NotOptimized, summary
from tunecompile.integrations import bitsandbytes, peft_parametrize
from tunecompile.integrations.loss_caller import causal_labels
from tunecompile.integrations.peft_trace import substitute
from tunecompile.integrations.rank_store import RankStore
from tunecompile.planner.device_memory import Spec
from tunecompile.runtime.cuda_graphs.replay import GraphReplays
from tunecompile.runtime.dynamic_shapes import batch_tokens
from tunecompile.runtime.find_layers import LayerStack, find_layers, find_norms, structure
from tunecompile.runtime.layer_slot import LayerSlot, NormSlot
from tunecompile.runtime.loss_head import Head, HeadSlot
from tunecompile.runtime.memory.across_ranks import RankPlans
from tunecompile.runtime.memory.host_embedding import HostEmbeddings
from tunecompile.runtime.memory.oom_recovery import Recovery
from tunecompile.runtime.memory.per_device import make_budgets
from tunecompile.runtime.memory.weight_cache import WeightCache
from tunecompile.runtime.region import Region, merge_tallies, pieces_of
from tunecompile.runtime.step import (
    EntryHook,
    NotCopied,
    PassThrough,
    ReplicaHook,
    Step,
    VerifyHook,
    only_checkpoints,
)
from tunecompile.runtime.telemetry import Telemetry, describe
from tunecompile.runtime.unpad.unpad import OwnerSlot, Unpadding

log = logging.getLogger("tunecompile")
ATTRIBUTE = "_tunecompile"  #: of a model, where its `State` is
VERIFIED = "verified"  #: what ranks tell each other of the first step: whether it is right, and in words
MOVES_ON = (["cuda"],)  #: types of devices on which dense weights move: all of them are on one
Precision = Literal["fp8"]


class Verdicts(Protocol):
    """What a verification found."""

    @property
    def passed(self) -> bool:
        """Whether loss and gradients are right."""
        ...

    def summary(self) -> str:
        """In a line."""
        ...


Verify = Callable[[nn.Module, Mapping[str, Any]], Verdicts]  #: of a model and one batch


def state_of(model: nn.Module) -> State:
    """What `optimize` attached to this model.

    Raises:
        NotOptimized: nothing.
    """
    state = getattr(model, ATTRIBUTE, None)
    if state is None:
        raise NotOptimized(type=type(model).__name__)
    return state


def is_optimized(model: nn.Module) -> bool:
    """Whether `optimize` attached anything to this very object."""
    return getattr(model, ATTRIBUTE, None) is not None


@dataclass
class State(NotCopied):
    """Everything `optimize` attached to one model."""

    model: nn.Module
    passes: tuple
    executor: Executor
    precision: Precision | None = None
    memory: Spec = None
    host_bytes: int | None = None
    offload_dir: Path | None = None
    tables: HostEmbeddings | None = None
    verify: Verify | None = None  #: what verifies the first training step, until it has
    board: RankStore | None = None  #: of the ranks that train the model
    step: Step = field(default_factory=Step)
    regions: list[Region] = field(default_factory=list)
    slots: list[LayerSlot] = field(default_factory=list)
    norms: list[NormSlot] = field(default_factory=list)  #: beside the layers
    heads: list[Head] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    paddings: list[Unpadding] = field(default_factory=list)
    parametrising: list[nn.Module] = field(default_factory=list)  #: that run as they are, inside layers
    unpacked: list[nn.Module] = field(default_factory=list)  #: linears that bitsandbytes would pack in evaluations
    embeddings: nn.Module | None = None
    replicated: bool = False  #: whether nn.DataParallel ever ran a replica
    replays: GraphReplays = field(default_factory=GraphReplays)
    kept: WeightCache = field(default_factory=WeightCache)

    def __reduce__(self) -> Any:
        return type(None), ()

    def __post_init__(self) -> None:
        self.pulse = Telemetry(lambda: describe(self.base(), self.memory, self.step.budget))

    def attach(self) -> None:
        self.step.recovery = Recovery(self.step, self.slots) if self.memory is not None else None
        self.follow_tables()
        self.unpacked = bitsandbytes.keep_unpacked(self.model)
        self.notes += bitsandbytes.note_packed(self.model)
        stacks = find_layers(self.model)
        longest = max(
            reversed(stacks), key=lambda stack: len(stack.members), default=None
        )  # a decoder rather than its encoder
        for stack in stacks:
            self._attach_layers(stack, counts=stack is longest)
        if not stacks:
            self.notes.append("no repeated layers were found: the model is compiled as one region")
            self._attach_whole()
            return
        if self.verify is not None:
            self.handles.append(self.model.register_forward_pre_hook(VerifyHook(self), with_kwargs=True))
        self.handles.append(self.model.register_forward_pre_hook(ReplicaHook(self)))
        self._attach_head()

    def _attach_layers(self, stack: LayerStack, counts: bool) -> None:
        kinds: dict[tuple, Region] = {}
        for index, layer in enumerate(stack.members):
            if slot_of(layer) is not None:
                self.notes.append(f"{stack.path}.{index} is compiled already and left as it is")
                continue
            kind = structure(layer)
            if kind not in kinds:
                name = "_".join((*stack.path.split("."), type(layer).__name__, *([str(len(kinds))] if kinds else [])))
                kinds[kind] = Region(name, self.passes, self.executor, self.replays, self.precision, self.kept)
                self.regions.append(kinds[kind])
            slot = LayerSlot(self.step, layer, kinds[kind])
            slot.place = len(self.slots)
            fill(layer, slot)
            self.slots.append(slot)
            self.parametrising += peft_parametrize.keep_from_dynamo(layer)
        self._attach_norms(stack)
        self.handles.append(
            stack.owner.register_forward_pre_hook(EntryHook(self, stack.owner, counts), with_kwargs=True)
        )
        if slot_of(stack.owner) is None:
            self._attach_padding(stack)
        elif isinstance(slot := slot_of(stack.owner), OwnerSlot):
            slot.padding.refused = "one module owns several lists of layers"

    def _attach_norms(self, stack: LayerStack) -> None:
        for norm in find_norms(stack.owner):
            if slot_of(norm) is None:
                name = "_".join((*stack.path.split(".")[:-1], type(norm).__name__))
                slot = NormSlot(self.step, norm, Region(name, self.passes, self.executor))
                fill(norm, slot)
                self.norms.append(slot)

    def _attach_padding(self, stack: LayerStack) -> None:
        padding = Unpadding(
            stack.owner, stack.members, self.step, lambda: not self.heads or len(self.unused_heads()) < len(self.heads)
        )
        fill(stack.owner, OwnerSlot(padding))
        self.paddings.append(padding)
        for slot in self.slots:
            slot.padding = padding if slot.layer in stack.members else slot.padding

    def _attach_whole(self) -> None:
        if slot_of(self.model) is not None:
            self.notes.append("the model is compiled already and left as it is")
            return
        region = Region(type(self.model).__name__, self.passes, self.executor, self.replays, self.precision, self.kept)
        slot = WholeSlot(self, region)
        self.regions.append(region)
        fill(self.model, slot)
        self.slots.append(slot)

    def _attach_head(self) -> None:
        find = getattr(self.model, "get_output_embeddings", None)
        module = self.embeddings = find() if callable(find) else None
        if not isinstance(module, nn.Module):
            self.notes.append("no output embedding was found: head and loss run as they are")
            return
        if slot_of(module) is not None:
            self.notes.append("the head is compiled already and left as it is")
            return
        head = Head(
            module,
            MatchCount("linear_cross_entropy", found=1),
            lambda: any(padding.flat for padding in self.paddings),
            self._logits_are_read,
            lambda: causal_labels()[0] is not None,
            self.step.recovery.attempt if self.step.recovery else self.step.telling,
        )
        fill(module, HeadSlot(self.step, head, self.passes))
        self.heads.append(head)

    def _logits_are_read(self) -> None:
        for padding in self.paddings:
            padding.logits_are_read()

    def follow_head(self) -> None:
        """An adapter may have put another module in the head's place since the last step."""
        if self.embeddings is not None and (found := self.model.get_output_embeddings()) is not self.embeddings:
            self.notes.append(f"the head became a {type(found).__name__} after `optimize`")
            self._detach_heads()
            self._attach_head()

    def follow_checkpointing(self) -> None:
        """The user may turn checkpointing on or off between any two steps; each layer runs the variant that does it inside. A function that does more than
        checkpoint, as transformers' does with `offload=True`, is called around the layer, unless what is saved is planned."""
        planned = self.memory is not None or bool(self.step.budgets)
        for slot in self.slots:
            slot.checkpoint, slot.checkpointed_by = bool(getattr(slot.layer, "gradient_checkpointing", False)), None
            function = slot.layer.__dict__.get("_gradient_checkpointing_func")
            if not slot.checkpoint or function is None:
                continue
            if not isinstance(function, PassThrough):
                function = slot.layer._gradient_checkpointing_func = PassThrough(function)
            if not planned and not only_checkpoints(function.function):
                slot.checkpoint, slot.checkpointed_by = False, function.function

    def follow_modules(self) -> None:
        """Those inside layers, for their hooks."""
        for slot in (*self.slots, *self.norms):
            slot.follow_modules()

    def follow_tables(self) -> None:
        """The model may come to its GPU after `optimize`."""
        if self.tables is not None and self.tables.pending:
            self.tables.take(self.model)

    def _devices(self) -> set[torch.device]:
        return {parameter.device for slot in self.slots for parameter in slot.layer.parameters()}

    def follow_weights(self) -> None:
        """Whether dense ones may move is decided at the first training step."""
        if self.kept.moves is None:
            types = [device.type for device in self._devices()]
            self.kept.moves = self.precision is None and types in MOVES_ON and all(slot.stays for slot in self.slots)
        self.kept.expect()

    def follow_budget(self) -> None:
        """Made at the first training step, when the model is where it will be trained."""
        if self.memory is None:
            return
        if not self.step.budgets:
            self.step.budgets = make_budgets(self)
            if not self.step.budgets:
                self.memory = None
                return
            self.step.recovery.agreement = RankPlans(self.meet())
        for budget in self.step.budgets:
            budget.begin()
        self.step.recovery.begin()

    def meet(self) -> RankStore:
        """Not before the first training step, when there are adapters and ranks."""
        if self.board is None:
            self.board = RankStore.of(self.model)
        return self.board

    def verify_once(self, args: tuple, kwargs: dict) -> None:
        """The first training step, before it is taken."""
        if self.verify is None or not self.model.training or not torch.is_grad_enabled() or others_trace():
            return
        verify, self.verify = self.verify, None
        try:
            names = [
                name
                for name, p in inspect.signature(self.model.forward).parameters.items()
                if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            ]
            if len(args) > len(names):
                raise CannotVerify(reason="the model's arguments have no names")
            result = verify(self.model, {**dict(zip(names, args)), **kwargs})
        except Exception as error:  # training goes on as it would have
            log.debug("the first step could not be verified", exc_info=True)
            self.notes.append(f"not verified: {summary(error)}")
            self.meet().say(VERIFIED, [False, self.notes[-1]])
            return
        self.notes.append(f"verified: {result.summary()}")
        self.meet().say(VERIFIED, [result.passed, result.summary()])
        if not result.passed:
            log.warning("%s", result)

    def again_with(self, passes: tuple, *notes: str) -> None:
        """Everything anew, with other passes."""
        self.detach()
        made = State(
            self.model,
            passes,
            self.executor,
            self.precision,
            self.memory,
            self.host_bytes,
            self.offload_dir,
            HostEmbeddings() if self.tables else None,
            board=self.board,
        )
        self.__dict__.update(made.__dict__)
        self.__post_init__()
        self.notes += notes
        self.attach()

    def detach(self) -> None:
        self.kept.move_out()
        if self.tables is not None:
            self.tables.give_back()
        self.pulse.stop()
        for handle in self.handles:
            handle.remove()
        for slot in self.norms:
            empty(slot.layer, slot)
            slot.let_go()
        for slot in self.slots:
            empty(slot.layer, slot)
            slot.let_go()
            function = slot.layer.__dict__.get("_gradient_checkpointing_func")
            if isinstance(function, PassThrough):
                slot.layer._gradient_checkpointing_func = function.function
        for module in self.parametrising:
            peft_parametrize.give_back(module)
        for module in self.unpacked:
            bitsandbytes.may_pack(module)
        for padding in self.paddings:
            if isinstance(slot := slot_of(padding.owner), OwnerSlot):
                empty(padding.owner, slot)
        self._detach_heads()

    def _detach_heads(self) -> None:
        for head in self.heads:
            if isinstance(slot := slot_of(head.module), HeadSlot):
                empty(head.module, slot)
                slot.let_go()
        self.heads.clear()

    def unused_heads(self) -> list[Head]:
        return [head for head in self.heads if not getattr(slot_of(head.module), "called", True)]

    def base(self) -> Any:
        """The model below adapters."""
        find = getattr(self.model, "get_base_model", None)
        return find() if callable(find) else self.model

    def compiled(self) -> list[Region]:
        """What the report tells of: norms outside the layers only where they run compiled."""
        return self.regions + [slot.region for slot in self.norms if slot.region.variants]

    def matches(self) -> list[MatchCount]:
        """What was found and rewritten, a family each, counted a layer, in the last graph compiled of each region; and of heads, whose losses are joined
        outside the regions."""
        tallies = [tally for region in self.compiled() for context in pieces_of(region) for tally in context.tallies]
        return merge_tallies(tallies, [head.tally for head in self.heads])


class WholeSlot(LayerSlot):
    """A model without repeated layers: entry and region are one."""

    def __init__(self, state: State, region: Region):
        super().__init__(state.step, state.model, region)
        self.state = state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.state.verify_once(args, kwargs)
        if slot_of(self.layer) is not self:  # a rewrite was switched off
            return slot_of(self.layer)(*args, **kwargs)
        self.step.enter(self.layer)
        if not self.step.active or self.step.recovery is None:
            return self._again(args, kwargs)
        return self.step.recovery.attempt(lambda: self._again(args, kwargs), restarts=True)

    def _again(self, args: tuple, kwargs: dict) -> Any:
        if self.step.active:
            substitute()
            self.follow_modules()
            self.state.follow_tables()
            self.state.follow_weights()
            self.state.follow_budget()
            self.state.pulse.beat(batch_tokens(args, kwargs))
        return super().__call__(*args, **kwargs)

    def differentiable(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, None]:
        """There are no other layers to be like."""
        return args, kwargs, None
