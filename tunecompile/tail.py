"""The head and the loss, joined wherever the loss is computed: in the model, in a trainer or in the user's own loop.

In a training step the head returns `LazyLogits`: a tensor that knows the hidden states and which head would be applied to them.
Casts, views, slices, scales and soft-caps are recorded. At `F.cross_entropy` the recorded chain becomes one
`linear_cross_entropy`, which never holds all logits; any other use computes the logits as if nothing had been deferred.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunecompile._torch import StorageWeakRef, hooked
from tunecompile.dispatch import Placement, place
from tunecompile.head import NotLinear, Peel, Product
from tunecompile.ops import linear_cross_entropy
from tunecompile.pipeline import Tally


@dataclass(frozen=True)
class Step:
    """One recorded call: `function(logits, *args, **kwargs)`."""

    function: Callable
    args: tuple
    kwargs: dict


SPARSE = 0.9  #: with a smaller share of labelled rows, finding them costs less than computing the others


@dataclass
class Labelled:
    """Which rows have a label. Finding them waits for the device, so that is done only where the last step's share, which was copied
    without waiting, says that it pays."""

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
            count = torch.empty((), dtype=torch.int64, pin_memory=True).copy_(labelled.sum(), non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            self.pending = count, copied, target.numel()
        return None


@dataclass
class Head:
    """A head whose logits are deferred, and the tally of what became of them."""

    module: nn.Module
    tally: Tally
    padded: Callable[[], bool] = lambda: False  #: whether the hidden states it is called with are zero at padding
    read: Callable[[], None] = lambda: None  #: told when such logits are read where their padding may matter
    looked_at: Callable[[], bool] = lambda: True  #: whether the labels of a loss that is computed now are known to leave padding out
    attempt: Callable[[Callable[[], Tensor]], Tensor] = lambda call: call()  #: again, with less, where memory runs out
    labelled: Labelled = field(default_factory=Labelled)

    def logits(self, hidden: Tensor, autocast: torch.dtype | None) -> Tensor:
        """The head, applied under the autocast dtype that held when it was called (None: under none)."""
        with torch.autocast(hidden.device.type, dtype=autocast, enabled=autocast is not None):
            return self.module._call_impl(hidden)

    def refuse(self, reason: str) -> None:
        if reason not in self.tally.refused:
            self.tally.refused.append(reason)


_CASTS = {Tensor.float, Tensor.to, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type}
_SHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.contiguous, Tensor.clone, torch.clone,
           Tensor.__getitem__, Tensor.unsqueeze, Tensor.squeeze}
_SCALES = {Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div, torch.div, Tensor.__truediv__, Tensor.true_divide}
_TANH = {Tensor.tanh, torch.tanh}
_DEFERRED = _CASTS | _SHAPES | _SCALES | _TANH


class LazyLogits(Tensor):
    """Logits that are computed when somebody reads them. Shape, dtype and device are those of the real ones."""

    @staticmethod
    def __new__(cls, head: Head, hidden: Tensor, steps: tuple[Step, ...], meta: Tensor, autocast: torch.dtype | None, product: Product):
        needs_grad = hidden.requires_grad or any(p.requires_grad for p in head.module.parameters())
        return Tensor._make_wrapper_subclass(cls, meta.shape, dtype=meta.dtype, device=hidden.device,
                                             requires_grad=torch.is_grad_enabled() and needs_grad)

    def __init__(self, head: Head, hidden: Tensor, steps: tuple[Step, ...], meta: Tensor, autocast: torch.dtype | None, product: Product):
        self._head, self._hidden, self._steps, self._meta, self._real = head, hidden, steps, meta, None
        self._head_autocast, self._product = autocast, product
        self._padded = head.padded()
        self._source: LazyLogits | None = None  #: whose memory this shares, as a view or a cast to the same dtype
        self._made_at = 0  #: how often somebody had written into the real ones when they were made

    def materialize(self) -> Tensor:
        """The logits themselves, part of the autograd graph like any others, also where they are first read under `no_grad`."""
        if self._real is not None:
            return self._real
        with torch.set_grad_enabled(self.requires_grad):
            # What shares memory has to go on doing so: somebody may write into it.
            real = self._apply(self._source.materialize(), self._steps[-1:]) if self._source is not None else self._head.attempt(self._compute)
        if not real.is_inference():  # such a tensor is of no use to a loss that comes later
            self._real, self._made_at = real, real._version
        return real

    def _compute(self) -> Tensor:
        return self._apply(self._head.logits(self._hidden, self._head_autocast), self._steps)

    @staticmethod
    def _apply(value: Tensor, steps: tuple[Step, ...]) -> Tensor:
        for step in steps:
            value = step.function(value, *step.args, **step.kwargs)
        return value

    def _then(self, step: Step, meta: Tensor) -> LazyLogits:
        """Deferred as well: `step` of these logits, whose shape and dtype `meta` has."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.requires_grad):  # a view made under `no_grad` has no history
            lazy = LazyLogits(self._head, self._hidden, (*self._steps, step), meta, self._head_autocast, self._product)
        lazy._padded = self._padded  # the model may have been called again since
        if StorageWeakRef(meta.untyped_storage()) == StorageWeakRef(self._meta.untyped_storage()):
            lazy._source = self
        return lazy

    @property
    def _deferred(self) -> bool:
        """Whether they are still what the hidden states say: nobody made them, or wrote into the memory they share."""
        if self._real is not None:
            return False
        base = self._source
        while base is not None and base._source is not None:
            base = base._source
        return base is None or base._real is None or base._real._version == base._made_at

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        lazy = args[0] if args and isinstance(args[0], LazyLogits) else kwargs.get("input")
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        others = itertools.chain(args[1:], kwargs.values())
        deferred = isinstance(lazy, LazyLogits) and lazy._deferred
        if func in _DEFERRED and deferred and not any(map(_holds_tensor, others)):
            if (meta := _try_meta(func, lazy._meta, args[1:], kwargs)) is not None:
                return lazy._then(Step(func, args[1:], kwargs), meta)
        given = {k: v for k, v in kwargs.items() if k != "input"}
        if torch.is_grad_enabled():
            _tell_of_padding((args, kwargs), lambda: func is F.cross_entropy and isinstance(lazy, LazyLogits) and _leaves_padding(lazy, *args[1:], **given))
        if func is F.cross_entropy and deferred:
            loss = _fused_loss(lazy, *args[1:], **given)
            if loss is not None:
                return loss
        elif deferred and torch.is_grad_enabled() and not lazy._head.tally.rewritten:
            lazy._head.refuse(f"logits are made: {getattr(func, '__name__', func)} reads them before any cross-entropy does")
        elif isinstance(lazy, LazyLogits) and torch.is_grad_enabled() and not lazy._head.tally.rewritten and (func is F.cross_entropy or func in _DEFERRED):
            lazy._head.refuse("logits are read, or written into, before the loss, which then takes them as they are")
        return func(*_real(args), **_real(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Reached only where Python's overrides are off. Logits have no history there, so a gradient would be lost: refuse."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        if torch.is_grad_enabled() and args and isinstance(args[0], LazyLogits) and args[0].requires_grad:
            raise RuntimeError(f"{func} reads deferred logits below autograd. Call tunecompile.restore(model) and report this use.")
        with torch.no_grad():
            return func(*_real(args), **_real(kwargs or {}))

    def __reduce_ex__(self, protocol):
        return self.materialize().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents=None):
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


_METADATA = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "is_cuda", "is_cpu", "layout",
                                                        "is_sparse", "is_leaf", "grad_fn", "ndim", "is_meta", "is_quantized")}
_METADATA |= {Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.numel, Tensor.get_device, Tensor.__len__, Tensor.is_complex,
              Tensor.__hash__, Tensor.__repr__, Tensor.element_size, Tensor.stride}


def _holds_tensor(item: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_leaves(item))


def _real(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.materialize() if isinstance(x, LazyLogits) else x, tree)


def _try_meta(func: Callable, meta: Tensor, args: tuple, kwargs: dict) -> Tensor | None:
    """The result's shape and dtype, or None where the call moves the tensor elsewhere or does not apply."""
    if func in (Tensor.to, Tensor.type) and any(not isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        devices = [a for a in (*args, *kwargs.values()) if isinstance(a, (str, torch.device))]
        return None if func is Tensor.type or devices else meta
    try:
        return func(meta, *args, **kwargs)
    except (RuntimeError, TypeError, IndexError, NotImplementedError):
        return None


def defer(head: Head, hidden: Tensor, product: Product) -> Tensor:
    """The head's output, deferred."""
    meta = torch.empty((*hidden.shape[:-1], product.weight.shape[0]), dtype=product.dtype, device="meta")
    return LazyLogits(head, hidden, (), meta, _autocast(hidden), product)


def _autocast(hidden: Tensor) -> torch.dtype | None:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@dataclass(frozen=True)
class _Chain:
    """Recorded steps, understood: rows to take of the hidden states, then softcap * tanh(scale * x / softcap), cast to `dtype`."""

    hidden: Tensor
    scale: float = 1.0
    softcap: float = 0.0
    tanh: bool = False
    flat: bool = False


def _understand(lazy: LazyLogits) -> _Chain | str:
    """The chain, or why it cannot be fused."""
    chain, shape = _Chain(lazy._hidden), tuple(lazy._hidden.shape[:-1])
    for step in lazy._steps:
        if step.function in _SCALES:
            factor = step.args[0] if step.args else None
            if not isinstance(factor, (int, float)) or step.kwargs:
                return "logits are scaled by something that is no constant"
            multiply = step.function not in (Tensor.div, torch.div, Tensor.__truediv__, Tensor.true_divide)
            if chain.tanh and (not multiply or chain.softcap):
                return "logits are changed after the soft-cap"
            if chain.tanh:
                chain = replace(chain, softcap=float(factor))
            else:
                chain = replace(chain, scale=chain.scale * factor if multiply else chain.scale / factor)
        elif step.function in _TANH:
            if chain.tanh:
                return "two tanh in a row"
            chain = replace(chain, tanh=True)
        elif step.function is Tensor.__getitem__:
            index = step.args[0] if isinstance(step.args[0], tuple) else (step.args[0],)
            rows = index[:len(shape)] if len(index) > len(shape) else index
            whole = all(i == slice(None) for i in index[len(rows):])
            if chain.flat or not whole or not all(isinstance(i, slice) for i in rows):
                return "logits are sliced in a way that is not understood"
            chain = replace(chain, hidden=chain.hidden[rows])
        elif step.function in _SHAPES - {Tensor.contiguous, Tensor.clone, torch.clone}:
            chain = replace(chain, flat=True)
    if chain.tanh and not chain.softcap:
        return "a tanh that is not scaled back"
    if chain.softcap:  # softcap * tanh(scale' * x) with scale' = scale / softcap
        chain = replace(chain, scale=chain.scale * chain.softcap)
    return chain


def _tell_of_padding(tree: Any, harmless: Callable[[], bool]) -> None:
    """Heads whose hidden states are zero at padding learn that their logits are read."""
    for leaf in torch.utils._pytree.tree_leaves(tree):
        if isinstance(leaf, LazyLogits) and leaf._padded and not harmless():
            leaf._head.read()


def _leaves_padding(lazy: LazyLogits, target: Tensor, *_args: Any, ignore_index: int = -100, **_options: Any) -> bool:
    """Whether a cross-entropy surely counts no row whose hidden state was given up, and so is zero. One in the model's forward has the labels that were
    looked at before; for others this waits for the device."""
    if lazy._head.looked_at():
        return True
    chain = _understand(lazy)
    if isinstance(chain, str) or target.is_floating_point() or lazy.dim() != 2 or _args[2:]:
        return False
    rows = chain.hidden.detach().flatten(0, -2)
    return rows.shape[:1] == target.shape and not bool(((rows == 0).all(-1) & (target != ignore_index).to(rows.device)).any())


def _fused_loss(lazy: LazyLogits, target: Tensor, weight: Tensor | None = None, size_average=None, ignore_index: int = -100,
                reduce=None, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor | None:
    """`F.cross_entropy` of the deferred logits, or None where it must be computed the plain way (the tally says why)."""
    head = lazy._head
    chain = _understand(lazy)
    reason = chain if isinstance(chain, str) else None
    if weight is not None or reduction not in ("mean", "sum") or size_average is not None or reduce is not None:
        reason = "class weights, or a reduction that is neither mean nor sum"
    elif target.dtype != torch.int64 or target.dim() != 1 or lazy.dim() != 2:
        reason = "labels are not one class a row"
    elif lazy.dtype not in (torch.float32, torch.float64):
        reason = f"the loss is computed in {lazy.dtype}"
    if reason is not None:
        head.refuse(reason)
        return None
    hidden = chain.hidden.reshape(-1, chain.hidden.shape[-1])
    if hidden.shape[0] != target.shape[0] or lazy.shape[-1] != lazy._product.weight.shape[0]:
        head.refuse("rows and labels differ in number, or the vocabulary is reshaped")
        return None
    head.tally.rewritten = head.tally.found
    with torch.set_grad_enabled(torch.is_grad_enabled() and lazy.requires_grad):
        return head.attempt(lambda: _call(lazy, hidden, target.to(hidden.device), chain, ignore_index, reduction, label_smoothing))


def _call(lazy, hidden, target, chain, ignore_index, reduction, label_smoothing) -> Tensor:
    product, dtype = lazy._product, lazy._product.dtype
    if (rows := lazy._head.labelled.rows(target, ignore_index)) is not None:
        hidden, target = hidden[rows], target[rows]
    with torch.autocast(hidden.device.type, enabled=False):  # the head ran under its own, which the loss need not share
        inner, outer = product.inner(hidden), product.outer()
    hidden, weight, bias = hidden.to(dtype), product.weight.to(dtype), None if product.bias is None else product.bias.to(dtype)
    loss = linear_cross_entropy(hidden, weight, bias, inner, outer, target, chain.scale, chain.softcap, ignore_index, label_smoothing,
                                hidden.requires_grad, weight.requires_grad or (bias is not None and bias.requires_grad))[0]
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum()
    return loss.to(lazy.dtype)


class HeadSlot:
    """What stands in the head's `_compiled_call_impl`.

    `called` tells whether a training step ever did: trainers may compute the loss from the head's weight by themselves.
    """

    def __init__(self, step: Any, head: Head, passes: tuple = ()):
        self.step, self.head, self.called = step, head, False
        self.peel = Peel(head.module, passes)
        self.placement: Placement | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.head.module
        if not self.called and torch.is_grad_enabled() and (module.training or self.step.active):  # not by `generate` between steps
            self.called, self.placement = True, place(module)
        if not self.step.active or not torch.is_grad_enabled() or len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return module._call_impl(*args, **kwargs)
        if self.placement is None:
            return self._deferred(*args)
        if self.placement.refused:
            self.head.refuse(f"the head runs as it is: {self.placement.refused}")
            return module._call_impl(*args)
        return self.placement.call(lambda args, _: self._deferred(*args), args, kwargs)

    def _deferred(self, hidden: Tensor) -> Tensor:
        try:
            product = self._product(hidden)
        except NotLinear as reason:
            self.head.refuse(f"the head is a {type(self.head.module).__name__} {reason}")
            return self.head.module._call_impl(hidden)
        if self.step.budget is not None:
            self.step.budget.settle()
        return defer(self.head, hidden, product)

    def _product(self, hidden: Tensor) -> Product:
        module = self.head.module
        if hooked(module):
            raise NotLinear("with hooks")
        if type(module) is not nn.Linear or "forward" in vars(module):
            return self.peel.product(hidden)
        return Product(module.weight, module.bias, _autocast(hidden) or torch.promote_types(hidden.dtype, module.weight.dtype))
