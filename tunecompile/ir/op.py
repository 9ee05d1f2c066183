"""Semantic ops: one plain PyTorch function is at once the meaning, the fake, the CPU path and the oracle of the tests.

    @op(cost=Cost.POINTWISE)
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    @swiglu.backward(saves=("gate", "up"), gives=("gate", "up"))
    def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]: ...

    @swiglu.provider("triton", supports=lambda gate, up: gate.is_cuda)
    def _(gate, up): ...

Ops are opaque to AOTAutograd, so that forward and backward keep their names in the joint graph; lowering then replaces each
by a provider. (A `triton_op` would be decomposed before the joint graph and could no longer be planned there.)

# What an op promises

- It changes none of its inputs, and returns neither them nor views of them.
- It says itself in which dtype it computes and returns: autocast is off inside. Element-wise arithmetic is in fp32, in fp64 for fp64, and
  rounded once. A replacement of another shape or dtype than what it replaces is refused.
- It runs on fake tensors and symbolic sizes too, as its own shape rule: no `.item()`, no shape that depends on values.
- It draws no random numbers, since it may be computed again. Dropout stays in the graph, and what it leaves is an input: `inputs` of
  `tunecompile.ops.lora.lora_linear`.
- Masks, offsets, labels and tables are inputs like others; what has no gradient is not named in `gives`.

# Its backward

It is an op of its own: the incoming gradients first, then what `saves` names. Of the op's outputs, only the first `outputs` have a gradient;
the others (a logsumexp, LoRA's inner product) are there to be saved, as `out1`, `out2`, ...

It returns a list: one gradient for each of `gives`, in that order and also for an input that is None; of a `Sequence[Tensor]` as many as it has
members. Each has shape and dtype of its input. All are computed, and those that nobody asked for are removed as dead code after lowering.
What is cheap is computed again rather than saved: name inputs in `saves`, and outputs only where they are dear.

# Which provider runs

Providers are asked when a graph is compiled, on fake tensors, and not in the step: those of the precision that the user allows first
(`optimize(precision=...)`), then those without one, each in the order in which they were registered. The first whose `refuses` gives None is
traced to core ATen in place of the op, so that Inductor fuses what it is made of; a Triton kernel started by `tunecompile.templates._launch`
becomes a node that Inductor launches. Where no provider runs, or tracing one raises, the reference does. The report names what was taken, with
`because`, or why each provider refused. A package may register providers for the ops of another, and is asked after those.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tunecompile._torch.autograd import no_autocast
from tunecompile.errors import InvalidOp, NoSecondDerivative
from tunecompile.ir.pretend_gpu import on_gpu
from tunecompile.ir.shape_rule_cache import remembered

__all__ = ["HALF", "OPS", "Cost", "Op", "Provider", "aten_name", "has_triton", "op", "refuse_gpu", "returns_view"]

NAMESPACE = "tunecompile"
_library = torch.library.Library(NAMESPACE, "DEF")


class Cost(enum.Enum):
    """What recomputing an op costs, which is what the planner decides by."""

    POINTWISE = "recompute"  #: memory-bound: never worth saving
    MATMUL = "save"  #: compute-bound: never recomputed while memory lasts


@dataclass(frozen=True)
class Provider:
    """One way to run an op. Made by `Op.provider`."""

    name: str  #: as the report shows it
    run: Callable  #: of the op's arguments; traced into the graph
    refuses: Callable[..., str | None]  #: of the op's arguments, tensors fake: a reason, or None
    precision: str | None = (
        None  #: it is less exact than the op's meaning, and taken only where the user asked for this
    )
    because: str = ""  #: what is gained over the reference, with what was measured where it was; the report shows it

    def supports(self, *args: Any) -> bool:
        """Whether it runs an op's `args`: fake tensors and constants."""
        return self.refuses(*args) is None


@dataclass
class Op:
    """A registered op, made by `op`. Call it like the function it was made from."""

    name: str  #: `tunecompile::name` to torch
    reference: Callable  #: the function itself
    cost: Cost  #: what the planner goes by
    flops: Callable[..., int] | None  #: of the arguments: floating point operations of one call
    parameters: tuple[str, ...]  #: of the reference
    opaque: bool = False  #: whether it is called as it is, and no provider is traced in its place
    providers: list[Provider] = field(default_factory=list)  #: in the order in which they are asked
    backward_op: Op | None = None  #: made by `Op.backward`; it has providers of its own
    tiled: Op | None = (
        None  #: the first output alone, in pieces: an op of the same parameters and `tiles`, whose backward saves only these
    )

    @property
    def overload(self) -> torch._ops.OpOverload:
        """What a node of a graph has as its target."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    def __call__(self, *args, **kwargs):
        return self.overload(*args, **kwargs)

    def provider(
        self,
        name: str,
        supports: Callable[..., bool] | None = None,
        refuses: Callable[..., str | None] | None = None,
        precision: str | None = None,
        because: str = "",
    ) -> Callable:
        """Register a provider, a function of the parameters of the reference. The first that supports the arguments is taken.

        It may ask for two things more, by keyword. `used`: which of its outputs are read, a bool each; the others may be None. `dying`: the
        names of parameters that are matrix products which this graph makes and only this call reads; what it makes may take their place.

        Args:
            name: as the report shows it.
            supports: of the op's arguments (fake tensors and constants): whether it can run them.
            refuses: the same with a reason, which the report shows: a string, or None where it can. Give one of the two.
            precision: "fp8", of a provider that is less exact than the op's meaning; None as a rule.
            because: what is gained over the reference, for the report.

        Returns:
            A decorator that leaves the function as it is.

        Raises:
            InvalidOp: the function's parameters are not those of the reference.
        """

        def register(run: Callable) -> Callable:
            parameters = inspect.signature(run).parameters.values()
            got = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
            if got != self.parameters:
                raise InvalidOp(
                    name=self.name, reason=f"provider {name!r} takes {got}, the reference takes {self.parameters}"
                )
            why_not = refuses or (lambda *args: None if supports(*args) else "its arguments are not supported")
            self.providers.append(Provider(name, run, why_not, precision, because))
            return run

        return register

    def choose(self, args: Sequence[Any], precision: str | None = None) -> Provider:
        """Which provider runs a call.

        Args:
            args: of the op: fake tensors and constants.
            precision: that the user allows; its providers come first.

        Returns:
            The first that supports the arguments, else the reference as a provider.
        """
        for wanted in dict.fromkeys((precision, None)):
            for provider in self.providers:
                if provider.precision == wanted and provider.supports(*args):
                    return provider
        return self.fallback()

    def refusals(self, args: Sequence[Any], precision: str | None) -> dict[str, str]:
        """Why providers do not run a call.

        Args:
            args: of the op: fake tensors and constants.
            precision: whose providers are asked; None for those of the model's own.

        Returns:
            A reason by the name of each that refuses.
        """
        asked = [provider for provider in self.providers if provider.precision == precision]
        return {provider.name: reason for provider in asked if (reason := provider.refuses(*args)) is not None}

    def fallback(self) -> Provider:
        """The reference as a provider."""
        return Provider("reference", self.reference, lambda *_: None)

    def backward(
        self,
        saves: Sequence[str],
        gives: Sequence[str | tuple[str, ...]],
        outputs: int = 1,
        cost: Cost | None = None,
        flops: Callable[..., int] | None = None,
        opaque: bool = False,
    ) -> Callable:
        """Register the backward, an op of its own: `(*gradients, *saves) -> [gradient of each of gives]`.

        It has no derivative itself: in a training step, asking for one raises `tunecompile.errors.NoSecondDerivative`.

        Args:
            saves: names of inputs of the op, or `out0`, `out1`, ... for its outputs. The function's parameters behind the gradients have these names.
            gives: names of inputs that get a gradient. One of type `Sequence[Tensor]` gets as many as it has members; inputs in a tuple share one.
            outputs: how many of the op's outputs, the first ones, are differentiable: so many gradients come in.
            cost: None for that of the op.
            flops: of the backward's arguments: floating point operations of one call.
            opaque: whether it is called as it is, and never traced into the graph.

        Returns:
            A decorator that makes the function an `Op`, which is also this op's `backward_op`.

        Raises:
            InvalidOp: the function takes something else, or its name is taken.
        """

        def register(fn: Callable) -> Op:
            self.backward_op = op(cost=cost or self.cost, flops=flops, opaque=opaque)(fn)
            if self.backward_op.parameters[outputs:] != tuple(saves):
                raise InvalidOp(
                    name=self.name,
                    reason=f"backward takes {self.backward_op.parameters[outputs:]}, saves are {tuple(saves)}",
                )
            _refuse_second_derivative(self.backward_op)
            _register_autograd(self, tuple(saves), tuple((g,) if isinstance(g, str) else g for g in gives), outputs)
            return self.backward_op

        return register


OPS: dict[Any, Op] = {}  #: the one registry: torch overload -> Op


def op(cost: Cost, flops: Callable[..., int] | None = None, opaque: bool = False) -> Callable[[Callable], Op]:
    """Register a function as a semantic op. It must not mutate or alias its inputs, and keeps the promises above.

    Its annotations become the schema: Tensor, Optional[Tensor], Sequence[Tensor], int, float, bool, str, torch.dtype and sequences of numbers;
    it returns a Tensor, a tuple of them, or a list.

    Args:
        cost: `Cost.POINTWISE` of what is bound by memory, `Cost.MATMUL` of what is bound by arithmetic.
        flops: of the op's arguments: floating point operations of one call, by which a memory budget weighs what is computed again. None: torch's
            counter is asked, about the function.
        opaque: whether it is called as it is, and never traced into the graph (a loop over chunks once a step, say).

    Returns:
        A decorator that makes the function an `Op`.

    Raises:
        InvalidOp: an op or another function of torch's namespace `tunecompile` has that name.
        ValueError: torch cannot make a schema of the annotations.
    """

    def register(fn: Callable) -> Op:
        name = fn.__name__
        schema = torch.library.infer_schema(fn, mutates_args=())
        if hasattr(getattr(torch.ops, NAMESPACE), name):
            owner = next((known.reference.__module__ for known in OPS.values() if known.name == name), "torch")
            raise InvalidOp(name=name, reason=f"the name is taken, by {owner}")
        kernel = _without_autocast(fn)
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", remembered(kernel), lib=_library)
        made = Op(name, fn, cost, flops, tuple(inspect.signature(fn).parameters), opaque)
        functools.update_wrapper(made, fn, updated=())
        OPS[made.overload] = made
        return made

    return register


def aten_name(target: Any) -> str:
    """The name of what a node calls, without its overload.

    Args:
        target: of a node.

    Returns:
        "mm" for `aten.mm.default`, say; "" for what is no ATen call.
    """
    return getattr(getattr(target, "overloadpacket", None), "__name__", "")


def returns_view(target: Any) -> bool:
    """Whether what a call returns lies in the memory of what it is given.

    Args:
        target: of a node of a joint, forward or backward graph.

    Returns:
        True for `aten.view.default`, say.
    """
    aliases = isinstance(target, torch._ops.OpOverload) and any(
        returned.alias_info is not None for returned in target._schema.returns
    )
    return aliases or target is torch.ops.aten._unsafe_view.default


@functools.cache
def has_triton() -> bool:
    """Whether templates can be imported. Ask only where a tensor is on a GPU: on a CPU Triton is never imported.

    Returns:
        True if a package `triton` is installed.
    """
    return importlib.util.find_spec("triton") is not None


HALF = (torch.float16, torch.bfloat16)  #: the dtypes that templates are for


def refuse_gpu(*tensors: torch.Tensor, triton: bool = True) -> str | None:
    """Why a GPU's kernel in half precision cannot take some tensors: how most `refuses` begin.

    Args:
        tensors: of any shape, fake ones too.
        triton: whether the kernel is a template.

    Returns:
        The reason, or None: all are on a GPU (`tunecompile.ir.pretend_gpu` may say so) and in fp16 or bf16, and Triton is installed if it is needed.
    """
    if not all(map(on_gpu, tensors)):
        return "not on a GPU"
    if wide := [t for t in tensors if t.dtype not in HALF]:
        return f"in {str(wide[0].dtype).removeprefix('torch.')}, not in half precision"
    return "Triton is not installed" if triton and not has_triton() else None


def _without_autocast(fn: Callable) -> Callable:
    """Ops state their dtypes themselves; an ambient autocast must not cast inside them a second time."""

    @functools.wraps(fn)
    def kernel(*args, **kwargs):
        with no_autocast():
            return fn(*args, **kwargs)

    return kernel


def _register_autograd(
    forward: Op, saves: tuple[str, ...], gives: tuple[tuple[str, ...], ...], differentiable: int
) -> None:
    names = forward.parameters

    def setup_context(ctx, inputs, output):
        values = dict(zip(names, inputs))
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        values.update({f"out{i}": value for i, value in enumerate(outputs)})
        ctx.mark_non_differentiable(*outputs[differentiable:])
        # torch's list support wants a list of gradients for every Tensor[] input, also an empty one.
        ctx.absent = {name for shared in gives for name in shared if values[name] is None}
        ctx.blank = {name: [None] * len(values[name]) if _is_tensor_list(values[name]) else None for name in names}
        tensors, ctx.saved_spec = torch.utils._pytree.tree_flatten([values[name] for name in saves])
        ctx.kept = [None if isinstance(value, torch.Tensor) else (value,) for value in tensors]
        ctx.save_for_backward(*(value for value in tensors if isinstance(value, torch.Tensor)))

    def backward(ctx, *grads):
        gradients = dict(ctx.blank)
        if grads[0] is not None:
            tensors = iter(ctx.saved_tensors)
            flat = [next(tensors) if kept is None else kept[0] for kept in ctx.kept]
            saved = torch.utils._pytree.tree_unflatten(flat, ctx.saved_spec)
            computed = iter(forward.backward_op(*grads[:differentiable], *saved))
            for shared in gives:
                blank = ctx.blank[shared[0]]
                gradient = next(computed) if blank is None else [next(computed) for _ in blank]
                gradients.update({name: gradient for name in shared if name not in ctx.absent})
        return tuple(gradients[name] for name in names)

    torch.library.register_autograd(f"{NAMESPACE}::{forward.name}", backward, setup_context=setup_context, lib=_library)


def _refuse_second_derivative(backward_op: Op) -> None:
    """Without a formula of its own torch would take the gradient for a constant, and only warn."""

    def refuse(ctx, *grads):
        raise NoSecondDerivative(name=backward_op.name)

    torch.library.register_autograd(f"{NAMESPACE}::{backward_op.name}", refuse, lib=_library)


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(member, torch.Tensor) for member in value)
