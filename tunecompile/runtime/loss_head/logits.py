"""Deferred logits, and the calls that are recorded on them."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile.ir.logit_chain import IN_PLACE, AddBias, Chain, Step, calls, read, same_numbers, spelled
from tunecompile.notes import note
from tunecompile.runtime.loss_head.deferred import (
    RECORD,
    GradientProbe,
    LazyTensor,
    handles,
    is_asked,
    lazily,
    pass_by,
    recipe_of,
)
from tunecompile.runtime.loss_head.linear_head import LinearHead


@dataclass(eq=False)
class Logits:
    """The recipe of logits: the head on hidden states, and what was recorded since."""

    head: Any  #: a `Head`
    hidden: Tensor
    product: LinearHead
    autocast: torch.dtype | None  #: under which the head was called
    meta: Tensor
    trained: bool
    padded: bool  #: whether the hidden states are zero at padding
    steps: tuple[Step, ...] = ()
    source: Logits | None = None  #: the logits whose memory this shares, as a view or a cast to the same dtype
    before: Logits | None = None  #: the input of the last step, where it may have other users
    #: the in-place products of all tensors that share the memory, each with the views that lead to it
    writes: list[tuple[tuple[Step, ...], Step]] = field(default_factory=list)
    path: tuple[Step, ...] = ()  #: from the first tensor of the memory
    seen: int = 0  #: of the writes, which `steps` have
    real: Tensor | None = None
    evaluated: bool = False  #: whether they are an evaluation's, whose readers get them exact, at padding, too
    #: to be registered if the logits are computed after all, by the numbers of their handles
    hooks: OrderedDict[int, Callable] = field(default_factory=OrderedDict)
    made_at: int = 0  #: version of the real logits when they were computed
    line: tuple[GradientProbe, ...] = field(init=False, default_factory=lambda: (GradientProbe(),))

    def __post_init__(self):
        self.made_of = self.steps  # before any write

    def materialize(self) -> Tensor:
        if self.real is not None:
            return self.real
        # outside of inference mode, whose tensors cannot be kept: somebody may write into logits, and read them again
        around = contextlib.nullcontext() if self.trained else torch.inference_mode(False)
        with around, torch.set_grad_enabled(self.trained):
            real = self._make()
            if self.source is None:
                self._write(real)
            if self.late and real.requires_grad:
                real.register_hook(_refuse_gradient)
            for number in self.hooks:
                real.register_hook(functools.partial(_call_hook, self.hooks, number))
        if not real.is_inference():  # an inference tensor is of no use to a later loss
            self.real, self.made_at, self.before = real, real._version, None
        return real

    def _make(self) -> Tensor:
        if self.source is not None:  # a view stays a view: it may be written to
            return self.path[-1](self.source.materialize())
        if self.before is not None and self.before.still(self.made_of[:-1]):
            return self.made_of[-1](self.before.materialize())
        return pass_by(self.head.try_alone(lambda: self.compute(self.made_of)), self.line[:-1])

    def _write(self, real: Tensor) -> None:
        for path, step in self.writes:
            place = real
            for view in path:
                place = view(place)
            step(place)

    @property
    def late(self) -> bool:
        """Whether what they are made of was written to since the head was called.

        A gathered weight is another tensor each time.
        """
        return self.head.gathered is None and self.product.changed

    def still(self, steps: tuple[Step, ...]) -> bool:
        """Whether the logits are unchanged since `steps`."""
        return self.steps == steps and self.pristine

    def recompute(self, hidden: Tensor) -> Tensor | None:
        return self.compute(self.steps, hidden) if self.pristine else None

    def compute(self, steps: tuple[Step, ...], hidden: Tensor | None = None) -> Tensor:
        """Return the logits after some `steps`, in new memory."""
        if self.late:
            self.head.read_late()
        value = self.head.logits(self.hidden if hidden is None else hidden, self.autocast, self.product)
        for step in steps:
            value = step(value)
        return value

    @property
    def chain(self) -> Chain:
        """What the steps amount to.

        Raises:
            Unfit: a step is no part of a chain.
        """
        sizes, product = self.hidden.shape[:-1], self.product
        return read(torch.empty((*sizes, product.vocabulary), dtype=product.dtype, device="meta"), self.steps)

    def rows(self, chain: Chain) -> Tensor:
        """Return the hidden states of a chain's rows: [T, H]."""
        return chain.rows_of(self.hidden, self.hidden.shape[-1])

    def then(self, step: Step, before: Logits | None = None) -> LazyTensor:
        """Return `step` of these logits, deferred as well."""
        # both are held: one address is one storage
        shared = step.made.untyped_storage()._cdata == self.meta.untyped_storage()._cdata
        place: dict[str, Any] = (
            dict(source=self, writes=self.writes, path=(*self.path, step), seen=self.seen) if shared else {}
        )
        return lazily(
            Logits(
                self.head,
                self.hidden,
                self.product,
                self.autocast,
                step.made,
                torch.is_grad_enabled() and self.trained,
                self.padded,
                (*self.steps, step),
                before=before,
                evaluated=self.evaluated,
                **place,
            )
        )

    @property
    def base(self) -> Logits:
        """The first recipe of the memory that these logits share."""
        base = self
        while base.source is not None:
            base = base.source
        return base

    @property
    def pristine(self) -> bool:
        """Whether the steps contain every write into the logits' memory."""
        base = self.base
        return self.seen == len(self.writes) and (base.real is None or base.real._version == base.made_at)

    @property
    def deferred(self) -> bool:
        """Whether the logits are still deferred: not computed, not written to, and no gradient at them is requested."""
        return self.real is None and self.pristine and not is_asked(self.line)

    def read_by(self, func: Callable) -> None:
        if self.head.tally.rewritten or not self.trained:  # a score's are anybody's
            return
        if self.deferred:
            self.head.refuse(note("logits-computed", getattr(func, "__name__", str(func))))
        elif func is F.cross_entropy or func in RECORD:
            self.head.refuse(note("logits-used-before-loss"))

    def read_at_padding(self) -> None:
        read = self.head.read_evaluated if self.evaluated else self.head.read
        whole = read(self.hidden, self.autocast) if self.real is None or self.pristine else None
        if whole is None:
            return
        ahead: list[Logits | None] = [self]
        while ahead:
            if (each := ahead.pop()) is not None:
                each.hidden, each.padded, each.real = whole, False, None  # metrics may have read them before
                ahead += [each.source, each.before]


def _refuse_gradient(grad: Tensor) -> None:
    raise RuntimeError("what logits are made of has been modified by an inplace operation before they were read")


def _call_hook(hooks: OrderedDict[int, Callable], number: int, grad: Tensor) -> Tensor | None:
    """A hook that was not removed since."""
    return hooks[number](grad) if number in hooks else None


def deferred(value: Any) -> Logits | None:
    """Return the recipe of logits that are still deferred; None for any other value."""
    recipe = recipe_of(value)
    return recipe if isinstance(recipe, Logits) and recipe.deferred else None


@handles(RECORD, *calls("cast", "copy", "reshape", "slice", "multiply", "divide", "tanh"))
def record(func: Callable, args: tuple, kwargs: dict) -> Any:
    """A call that leaves the rows of logits apart."""
    if not args:
        args, kwargs = (kwargs.get("input"),), {name: item for name, item in kwargs.items() if name != "input"}
    recipe = deferred(args[0])
    meta = None if recipe is None else shape_of(func, recipe.meta, args[1:], kwargs)
    if recipe is None or meta is None or not same_numbers(func, recipe.meta, meta):
        return NotImplemented
    return recipe.then(Step(func, meta, args[1:], kwargs))


@handles(RECORD, *spelled("add __add__ __radd__"))
def add_bias(func: Callable, args: tuple, kwargs: dict) -> Any:
    """A bias outside the head, as of BART. It is copied, since the logits may be computed once it has changed."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    lazy, bias = args if isinstance(args[0], LazyTensor) else args[::-1]
    recipe = deferred(lazy)
    if recipe is None or type(bias) not in (Tensor, torch.nn.Parameter):
        return NotImplemented
    words = recipe.product.vocabulary
    one_a_word = bias.shape[-1:] == (words,) and bias.numel() == words and bias.dim() <= recipe.meta.dim()
    if not one_a_word or recipe.meta.shape[-1] != words or bias.requires_grad:
        return NotImplemented
    if bias.device != recipe.hidden.device or not bias.dtype == recipe.product.dtype == recipe.meta.dtype:
        return NotImplemented
    return recipe.then(Step(AddBias(bias.detach().reshape(-1).clone()), torch.empty_like(recipe.meta)))


@handles(RECORD, *IN_PLACE)
def write(func: Callable, args: tuple, kwargs: dict) -> Any:
    """A temperature, as of TRL's GRPO. All that shares the memory has it from now on."""
    recipe = deferred(args[0])
    if recipe is None or recipe.base.real is not None or kwargs:
        return NotImplemented
    if (
        not isinstance(args[1], (int, float))
        or recipe.trained != recipe.base.trained
        or (recipe.trained and not torch.is_grad_enabled())
    ):
        return NotImplemented
    step = Step(func, recipe.meta, args[1:])
    recipe.steps, recipe.seen = (*recipe.steps, step), recipe.seen + 1
    recipe.writes.append((recipe.path, step))
    return args[0]


def shape_of(func: Callable, meta: Tensor, args: tuple, kwargs: dict) -> Tensor | None:
    """What a call gives that takes no other tensor: its shape and dtype.

    None where it cannot be recorded: it moves the tensor elsewhere, or does not apply.
    """
    if any(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
        return None
    if func in (Tensor.to, Tensor.type) and any(not isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        devices = [a for a in (*args, *kwargs.values()) if isinstance(a, (str, torch.device))]
        return None if func is Tensor.type or devices else meta
    try:
        return func(meta, *args, **kwargs)
    except (RuntimeError, TypeError, IndexError, NotImplementedError):
        return None
