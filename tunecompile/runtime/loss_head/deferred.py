"""Deferred tensors: computed when their values are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from tunecompile._torch.autograd import plain_tensors
from tunecompile.errors import NoGradient
from tunecompile.ir.logit_chain import Unfit
from tunecompile.notes import Note
from tunecompile.runtime.watch.module_watch import hook_node


@dataclass(eq=False)
class GradientProbe:
    """The place of a deferred tensor in the autograd graph."""

    asked: str = ""  #: the call that requested the gradient that arrives here


class DeferredValue(Protocol):
    """How a tensor is made."""

    meta: Tensor  #: its shape, strides and dtype
    hidden: Tensor
    trained: bool  #: whether it has a history
    padded: bool  #: whether the hidden states are zero at padding
    evaluated: bool  #: whether it is an evaluation's
    head: Any
    line: tuple[GradientProbe, ...]  #: of all that it was recorded from, then its own

    def materialize(self) -> Tensor:
        """Return the computed tensor, part of the autograd graph; the same one at each call."""

    def recompute(self, hidden: Tensor) -> Tensor | None:
        """Compute it from `hidden`, in a new graph and new memory; None where it was written to."""

    def read_by(self, func: Callable) -> None:
        """Note for the report that `func` is about to read it."""

    def read_at_padding(self) -> None:
        """What stands at padding is about to be read: have it computed, if that is still possible."""


#: function -> (function, args, kwargs) -> a tensor: deferred by `RECORD`, computed by `LOSSES`; or NotImplemented.
#: A handler may raise `Unfit`.
Handler = Callable[[Callable, tuple, dict], Any]
RECORD: dict[Callable, Handler] = {}
LOSSES: dict[Callable, Handler] = {}
#: of losses that leave out rows by their labels: (lazy, args, kwargs) -> whether those at padding are surely among them
MASKS: dict[Callable, Callable[[LazyTensor, tuple, dict], bool]] = {}


def handles(table: dict, *functions: Callable) -> Callable:
    """Register the decorated handler for calls of `functions`."""

    def register(handler: Callable) -> Callable:
        table.update(dict.fromkeys(functions, handler))
        return handler

    return register


class _History(torch.autograd.Function):
    """The node of a deferred tensor in the autograd graph, for users that read no value: a custom function, say."""

    @staticmethod
    def forward(ctx, recipe: DeferredValue, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.recipe, ctx.inputs = (
            recipe,
            (hidden, *parameters),
        )  # not saved as tensors are: no value of theirs is needed that is not kept otherwise
        ctx.versions = [t._version for t in ctx.inputs]
        return LazyTensor(recipe)

    @staticmethod
    @once_differentiable  # another graph than the caller's is walked
    def backward(ctx, grad: Tensor) -> tuple:
        if ctx.versions != [t._version for t in ctx.inputs]:
            raise RuntimeError(
                "what logits are made of has been modified by an inplace operation "
                "between the forward and the backward pass"
            )
        hidden, needed = ctx.inputs[0], ctx.needs_input_grad[1:]
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_(hidden.requires_grad)
            made = None if is_asked(ctx.recipe.line) else ctx.recipe.recompute(leaf)  # hooks are on the real one
            if made is None:
                leaf, made = hidden, ctx.recipe.materialize()
        sources = [t for t, wanted in zip((leaf, *ctx.inputs[1:]), needed) if wanted]
        found = iter(torch.autograd.grad(made, sources, grad, retain_graph=True, allow_unused=True))
        return None, *(next(found) if wanted else None for wanted in needed)


class _Adopted(torch.autograd.Function):
    """The value of a deferred tensor that a custom function returned; the gradient goes to that function's backward."""

    @staticmethod
    def forward(ctx, lazy: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return grad, None


class LazyTensor(Tensor):
    """A tensor that is made by its recipe when somebody reads it. Shape, strides, dtype and device are those of the
    real one: a kernel takes the strides of what it is given, and the address, for which the real one is made (TRL's
    Triton kernels for log-probabilities)."""

    @staticmethod
    def __new__(cls, recipe: DeferredValue):
        like = recipe.meta
        return Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=recipe.hidden.device
        )

    def __init__(self, recipe: DeferredValue):
        self.recipe = recipe

    @property
    def adopted(self) -> bool:
        """Whether a custom autograd function returned it without a history of its own. (DDP's function only clones.)"""
        if self.recipe.trained or not self.requires_grad:
            return False
        self.recipe.trained = type(natively(Tensor.grad_fn.__get__, self)).__name__ == "_DDPSinkBackward"
        return not self.recipe.trained

    def real(self) -> Tensor:
        """Its value, part of the autograd graph as it is."""
        value = self.recipe.materialize()
        return _Adopted.apply(self, value) if torch.is_grad_enabled() and self.adopted else value

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        made, why_not = _ask(RECORD, func, args, kwargs)
        if made is NotImplemented:
            _tell_of_padding(func, args, kwargs)
            if why_not is None:
                made, why_not = _ask(LOSSES, func, args, kwargs)
            if made is not NotImplemented:
                return pass_by(made, _line((args, kwargs)))
        else:
            return _record_line(made, (args, kwargs))
        recipe = next(leaf.recipe for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, LazyTensor))
        if why_not is not None:
            recipe.head.refuse(why_not)
        elif torch.is_grad_enabled():
            recipe.read_by(func)
        return func(*_real(args), **_real(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Reached only where Python's overrides are off; the history is autograd's, by `_History`."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        with torch.no_grad():
            return func(*_real(args), **_real(kwargs or {}))

    def __reduce_ex__(self, protocol):
        return self.recipe.materialize().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents=None):
        return f"Lazy(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


_ATTRIBUTES = "shape dtype device requires_grad is_cuda is_cpu layout is_sparse is_leaf ndim is_meta is_quantized _base"
_CALLS = "size dim is_floating_point numel get_device __len__ is_complex __hash__ __repr__ element_size stride"
_METADATA = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split()}
_METADATA |= {getattr(Tensor, name) for name in _CALLS.split()}


def lazily(recipe: DeferredValue) -> LazyTensor:
    """Return the deferred tensor of `recipe`."""
    return (
        _History.apply(recipe, recipe.hidden, *recipe.head.module.parameters())
        if recipe.trained
        else LazyTensor(recipe)
    )


def recipe_of(value: Any) -> Any:
    """Return the recipe of a deferred tensor; None for any other value."""
    return value.recipe if isinstance(value, LazyTensor) and not value.adopted else None


def natively(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call `func` with deferred tensors treated as plain ones, at their places in the autograd graph."""
    with plain_tensors():
        return func(*args, **kwargs)


# -- requested gradients --

_PASSED_BY = "tunecompile.passed_by"  #: in a node's metadata
WITHOUT = "the loss was computed without making them"


def is_asked(line: Iterable[GradientProbe]) -> bool:
    """Return whether a gradient at one of these places is requested."""
    return any(place.asked for place in line)


def pass_by(made: Tensor, line: Iterable[GradientProbe]) -> Tensor:
    """Return `made`, whose gradient does not arrive at the places of `line`.

    If a gradient there is requested, now or later, the backward pass raises `NoGradient`.
    """
    line, node = tuple(line), made.grad_fn
    if node is None or not line:
        return made

    def tell(_: tuple) -> None:
        asked = next((place.asked for place in line if place.asked), "")
        if asked:
            raise NoGradient(asked=asked, reason=WITHOUT)

    hook_node(node, tell)
    node.metadata[_PASSED_BY] = line
    return made


def passed_by(outputs: Iterable[Tensor]) -> set[GradientProbe]:
    """Return the places at which the gradient of `outputs` does not arrive, or not all of it."""
    nodes, places = (
        {natively(Tensor.grad_fn.__get__, output) for output in outputs if isinstance(output, Tensor)} - {None},
        set(),
    )
    ahead = list(nodes)
    while ahead:
        node = ahead.pop()
        places.update(
            node.metadata.get(_PASSED_BY, ()) if not isinstance(node, _History._backward_cls) else node.recipe.line
        )
        new = {behind for behind, _ in node.next_functions if behind is not None} - nodes
        nodes |= new
        ahead += new
    return places


def _line(tree: Any) -> tuple[GradientProbe, ...]:
    """Of all deferred tensors there, each place once."""
    return tuple(
        dict.fromkeys(
            place for leaf in pytree.tree_leaves(tree) if isinstance(leaf, LazyTensor) for place in leaf.recipe.line
        )
    )


def _record_line(made: Any, given: Any) -> Any:
    """What was recorded `made` of what was `given`, which may be the same in another state."""
    line = _line(given)
    for leaf in pytree.tree_leaves(made):
        if isinstance(leaf, LazyTensor) and leaf.recipe.line[-1] not in line:
            leaf.recipe.line = (*line, leaf.recipe.line[-1])
    return made


def _ask(table: dict[Callable, Handler], func: Callable, args: tuple, kwargs: dict) -> tuple[Any, Note | None]:
    """(what the handler of a call makes, or NotImplemented; why it is unfit, where that is known)."""
    try:
        return table[func](func, args, kwargs) if func in table else NotImplemented, None
    except Unfit as unfit:
        return NotImplemented, unfit.reason


def _real(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.real() if isinstance(x, LazyTensor) else x, tree)


def _tell_of_padding(func: Callable, args: tuple, kwargs: dict) -> None:
    """Tell heads with zeros at padding that their logits are read where nothing shows that padding is left out."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if (
            isinstance(leaf, LazyTensor)
            and leaf.recipe.padded
            and (torch.is_grad_enabled() or leaf.recipe.evaluated)
            and not (func in MASKS and MASKS[func](leaf, args, kwargs))
        ):
            leaf.recipe.read_at_padding()
