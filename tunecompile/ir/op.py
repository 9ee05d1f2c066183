"""Semantic ops: one plain PyTorch function is the meaning, the shape rule, the CPU path and the oracle of the tests.

    @op(cost=Cost.POINTWISE)
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    @swiglu.backward(gives=("gate", "up"))
    def swiglu_backward(grad, gate, up): ...

    @swiglu.provider("triton", refuses=lambda gate: None if gate.is_cuda else "not on a GPU")
    def _(gate, up): ...

AOTAutograd does not look inside an op, so forward and backward keep their names in the joint graph, where memory is
planned. Lowering then replaces each op by a provider: one implementation of it. (A `triton_op` would be decomposed
before the joint graph, and could no longer be planned there.)

# What an op promises

- It mutates none of its inputs, and returns neither an input nor a view of one.
- It chooses the dtypes in which it computes and returns; autocast is off inside. Elementwise arithmetic is in fp32
  (fp64 for fp64) and rounded once. A rewrite whose replacement has another shape or dtype than the original is
  refused.
- It runs on fake tensors and symbolic sizes, as its own shape rule (or has another one, `shapes`): no `.item()`, no
  shape that depends on values.
- It draws no random numbers, since it may be recomputed. Dropout stays in the graph, and its result is an input of the
  op: `inputs` of `tunecompile.ops.lora.lora_linear`.
- Masks, offsets, labels and tables are ordinary inputs. An input without a gradient is left out of `gives`.

# Its backward

The backward is an op, too. Its parameters are the incoming gradients, then the values that it saves: the op's inputs
by their names, whose types they have, and its outputs as `out0`, `out1`, ... Only the first `outputs` outputs of the
op are differentiable; the others (a logsumexp, LoRA's inner product) exist to be saved.

It returns a list: one gradient for each name in `gives`, in that order, also for an input that is None; for an input of
type `Sequence[Tensor]`, one for each member. A gradient has the shape and dtype of its input. The backward computes all
of them; unused ones are removed as dead code after lowering. Save inputs, and recompute cheap values from them; save an
output only where it is expensive to recompute.

# Which provider runs

A provider is chosen when a graph is compiled, from fake tensors; nothing is chosen during a step. Providers of the
precision that the user allows (`optimize(precision=...)`) come first, then those without a precision, each in the
order of registration. The first one whose `refuses` returns None is traced to core ATen in place of the op, so that
Inductor fuses its parts; a Triton kernel launched through `tunecompile.templates._launch` becomes a node that
Inductor launches. Where every provider refuses, or tracing one raises, the reference is traced instead. The report
shows the chosen provider with its `because`, and the reason of each one that refused. A package may register
providers for the ops of another package; they come after the providers registered before them."""

from __future__ import annotations

import enum
import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tunecompile._torch.card import has_bfloat16, warp_size
from tunecompile.errors import InvalidOp
from tunecompile.ir.dispatch import (
    Formula,
    by_position,
    declared_of,
    refuse_second_derivative,
    register_formula,
    takes_by_name,
    without_autocast,
)
from tunecompile.ir.pretend_gpu import on_gpu
from tunecompile.ir.shape_rule_cache import first_of, remembered
from tunecompile.notes import Note, note

__all__ = [
    "HALF",
    "OPS",
    "Cost",
    "Op",
    "Provider",
    "aten_name",
    "has_triton",
    "op",
    "refuse_gpu",
    "refuse_spills",
    "returns_view",
]

NAMESPACE = "tunecompile"
FILLED_IN = ("used", "dying")  #: what lowering tells a provider that declares it, see `Op.provider`
_library = torch.library.Library(NAMESPACE, "DEF")


class Cost(enum.Enum):
    """How expensive an op is to recompute; the memory planner decides by it."""

    POINTWISE = "recompute"  #: memory-bound: never worth saving
    MATMUL = "save"  #: compute-bound: never recomputed while memory lasts


@dataclass(frozen=True)
class Provider:
    """One implementation of an op. Made by `Op.provider`."""

    name: str  #: shown in the report
    run: Callable  #: takes the op's arguments by position; it is traced into the graph
    refuses: Callable[..., str | None]  #: takes the op's arguments by position, with fake tensors; a reason, or None
    precision: str | None = (
        None  #: "fp8" or "int8": less exact than the op's meaning, and only where the user allows it
    )
    because: str = ""  #: the gain over the reference, with measured figures if there are any; shown in the report

    def supports(self, *args: Any) -> bool:
        """Whether this provider can run a call with the arguments `args`: fake tensors and constants."""
        return self.refuses(*args) is None

    def distrusted(self, why: Any) -> Provider:
        """The same, refusing all calls since it failed a trial. why: what it says to each."""
        return replace(self, refuses=lambda *_: why)


@dataclass
class Op:
    """A registered op, made by the decorator `op`. Call it like the function that it was made from."""

    name: str  #: torch knows the op as `tunecompile::name`
    reference: Callable  #: the decorated function
    cost: Cost  #: how expensive it is to recompute
    flops: Callable[..., int] | None  #: takes the op's arguments; floating point operations of one call
    parameters: tuple[str, ...]  #: names of the reference's parameters
    opaque: bool  #: its reference is called as it is, and never traced: providers alone are
    providers: list[Provider] = field(default_factory=list)  #: in the order of registration
    backward_op: Op | None = None  #: made by `Op.backward`; it has providers of its own
    formula: Formula | None = None  #: what `Op.backward` was told
    owner: Op | None = None  #: the op whose backward this is
    #: takes a `tunecompile.ir.example.Draw`, returns arguments of a call
    example: Callable[..., list] | None = None
    #: an op that computes the first output tile by tile; it takes `tiles` besides, and saves only its arguments
    tiled: Op | None = None
    #: takes the op's arguments; bytes that its providers have in memory beside results while they run
    room: Callable[..., int] | None = None
    #: parameters that its arithmetic widens first: a call may give them before a cast to a wider dtype
    widens: tuple[str, ...] = ()

    @property
    def overload(self) -> torch._ops.OpOverload:
        """The target of this op's nodes in a graph."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    def __call__(self, *args, **kwargs):
        """Call the op by way of torch's dispatcher."""
        return self.overload(*args, **kwargs)

    def provider(
        self,
        name: str,
        supports: Callable[..., bool] | None = None,
        refuses: Callable[..., str | None] | None = None,
        precision: str | None = None,
        because: str = "",
    ) -> Callable[[Callable], Callable]:
        """Register an implementation of this op.

        The decorated function takes the parameters of the reference, in the same order. An op of many parameters may
        have a provider that takes some of them as keyword-only parameters, and the rest as `**name`.

        Two more keyword-only parameters are filled in for a provider that declares them. `used`: a bool for each
        output, False where nothing reads it; the provider may return None for those. `dying`: names of parameters
        that are matrix products computed in this graph and read only by this call; a result may be written into their
        memory.

        Args:
            name: shown in the report.
            supports: returns whether the provider can run a call. It receives fake tensors and constants: the op's
                arguments of the names that it declares, or all by position where it declares `*args`.
            refuses: in place of `supports`, returns the reason why the provider cannot run a call, which the report
                shows, or None where it can. Give one of the two.
            precision: "fp8" or "int8" for a provider that is less exact than the op's meaning; otherwise None.
            because: the gain over the reference, for the report.

        Returns:
            A decorator that returns the function unchanged.

        Raises:
            InvalidOp: the function's parameters are not those of the reference, or neither `supports` nor `refuses`
            is given."""

        def register(run: Callable) -> Callable:
            test = refuses or supports
            if test is None:
                raise InvalidOp(name=self.name, reason=f"provider {name!r} has neither `supports` nor `refuses`")
            bound = declared_of(test, self.parameters)
            reason = bound if refuses else lambda *args: None if bound(*args) else note("arguments-not-supported")
            self.providers.append(Provider(name, self._positional(run, name), reason, precision, because))
            return run

        return register

    def _positional(self, run: Callable, provider: str) -> Callable:
        """A provider's function, to be called with the op's arguments by position."""
        declared = inspect.signature(run).parameters.values()
        by_name = takes_by_name(run)
        skipped = inspect.Parameter.VAR_KEYWORD if by_name else inspect.Parameter.KEYWORD_ONLY
        wanted = tuple(parameter.name for parameter in declared if parameter.kind is not skipped)
        if set(wanted) - set(FILLED_IN) - set(self.parameters) if by_name else wanted != self.parameters:
            raise InvalidOp(
                name=self.name, reason=f"provider {provider!r} takes {wanted}, the reference takes {self.parameters}"
            )
        return by_position(run, self.parameters)

    def choose(self, args: Sequence[Any], precision: str | None = None) -> Provider:
        """Return the provider that runs a call: the first that supports the arguments, else the reference.

        Args:
            args: the op's arguments: fake tensors and constants.
            precision: the reduced precision that the user allows; providers of it come first. None allows none.
        """
        for wanted in (*formats(precision), None):
            for provider in self.providers:
                if provider.precision == wanted and provider.supports(*args):
                    return provider
        return self.fallback()

    def refusals(self, args: Sequence[Any], precision: str | None) -> dict[str, str]:
        """Return why providers cannot run a call: a reason for each one that refuses, by its name.

        Args:
            args: the op's arguments: fake tensors and constants.
            precision: only providers of this precision are considered; None for those without one.
        """
        candidates = [p for p in self.providers if p.precision in (formats(precision) or (None,))]
        return {provider.name: reason for provider in candidates if (reason := provider.refuses(*args)) is not None}

    def fallback(self) -> Provider:
        """Return the reference as a provider."""
        return Provider("reference", self.reference, lambda *_: None)

    def backward(
        self,
        saves: Sequence[str] | None = None,
        *,
        gives: Sequence[str | tuple[str, ...]],
        outputs: int = 1,
        cost: Cost | None = None,
        flops: Callable[..., int] | None = None,
        opaque: bool = False,
        shapes: Callable | None = None,
        widens: bool = False,
    ) -> Callable[[Callable], Op]:
        """Register the backward as an op: `(*gradients, *saves) -> [a gradient for each name in gives]`.

        The backward has no derivative: a double backward raises `tunecompile.errors.NoSecondDerivative`.

        Args:
            saves: names of the function's parameters after the gradients: inputs of the op, or `out0`, `out1`, ... for
                its outputs. None: as the function has them; where it takes keywords and `**name`, all of the op's
                inputs, and the outputs among its keywords.
            gives: names of inputs that get a gradient. An input of type `Sequence[Tensor]` gets one for each member;
                inputs in a tuple share one gradient.
            outputs: how many of the op's outputs, counted from the first, are differentiable: as many gradients come
                in.
            cost: how expensive the backward is to recompute; None for the cost of the op.
            flops: takes the backward's arguments; floating point operations of one call.
            opaque: as for `op`.
            shapes: as for `op`.
            widens: whether its arithmetic casts the incoming gradients first, and nothing it returns has their dtype.
                What autocast has cast to fp32 behind the op is then read as it was.

        Returns:
            A decorator that makes the function an `Op`, which also becomes this op's `backward_op`. Parameters without
            an annotation have the types of this op's of the same names; gradients and outputs are tensors.

        Raises:
            InvalidOp: the function's parameters are not the gradients and `saves`, or its name is taken.
        """

        def register(fn: Callable) -> Op:
            types = inspect.get_annotations(self.reference, eval_str=True)
            names = tuple(inspect.signature(fn).parameters)
            if takes_by_name(fn):
                names = (*names[:outputs], *self.parameters, *(n for n in names[outputs:] if n.startswith("out")))
            saved = names[outputs:]
            if saves is not None and tuple(saves) != saved:
                raise InvalidOp(
                    name=self.name,
                    reason=f"its backward takes {saved} behind {outputs} incoming gradients, but saves={tuple(saves)}",
                )
            known = {name: types.get(name, torch.Tensor) for name in names} | {"return": list[torch.Tensor]}
            fn.__annotations__ = known | fn.__annotations__
            fn = by_position(fn, names, fn.__annotations__)
            made = op(cost=cost or self.cost, flops=flops, opaque=opaque, shapes=shapes)(fn)
            made.widens = made.parameters[:outputs] if widens else ()
            self.backward_op, made.owner = made, self
            shared = tuple((g,) if isinstance(g, str) else tuple(g) for g in gives)
            refuse_second_derivative(_library, made.name)
            self.formula = Formula(self.parameters, made, saved, shared, outputs)
            register_formula(_library, self.name, self.formula)
            return made

        return register


OPS: dict[Any, Op] = {}  #: every registered op, by its torch overload; the only registry


def op(
    cost: Cost,
    flops: Callable[..., int] | None = None,
    opaque: bool = False,
    shapes: Callable | None = None,
    takes: Op | None = None,
    example: Callable[..., list] | None = None,
) -> Callable[[Callable], Op]:
    """Register a function as a semantic op. It keeps the promises listed in `tunecompile.ir.op`.

    The annotations become the op's schema. Parameters are Tensor, Optional[Tensor], Sequence[Tensor], int, float, bool,
    str, torch.dtype or sequences of numbers; the result is a Tensor, a tuple of them, or a list.

    Args:
        cost: `Cost.POINTWISE` for a memory-bound op, `Cost.MATMUL` for a compute-bound one.
        flops: takes the op's arguments; floating point operations of one call, by which a memory budget weighs
            recomputation. None: torch's FLOP counter is run on the function.
        opaque: whether the function is called as it is, and never traced into the graph (for instance a loop over
            chunks). Where no provider supports a call, the op stays in the graph.
        shapes: takes the op's arguments; returns empty tensors like its results. Where it returns None, and without
            it, the function itself is run on fake tensors, which takes long if it has many steps or sizes are symbols.
        takes: an op whose parameters this one has, too. The function then takes those that it reads, and its own, as
            keyword-only parameters, and the rest as `**name`; its own come last.
        example: takes a `tunecompile.ir.example.Draw`, and returns the arguments of a call with its tensors and sizes.
            With these, providers that launch templates are tried, tested, compiled for other GPUs and timed, and so are
            those of the backward.

    Returns:
        A decorator that makes the function an `Op`.

    Raises:
        InvalidOp: an op or another function of torch's namespace `tunecompile` has that name.
        ValueError: torch cannot make a schema of the annotations.
    """

    def register(fn: Callable) -> Op:
        name = fn.__name__
        if takes is not None:
            own = inspect.get_annotations(fn, eval_str=True)
            types = inspect.get_annotations(takes.reference, eval_str=True) | own
            names = (*takes.parameters, *(n for n in own if n not in (*takes.parameters, "return")))
            fn.__annotations__ = types
            fn = by_position(fn, names, types)
        schema = torch.library.infer_schema(fn, mutates_args=())
        if hasattr(getattr(torch.ops, NAMESPACE), name):
            owner = next((known.reference.__module__ for known in OPS.values() if known.name == name), "torch")
            raise InvalidOp(name=name, reason=f"the name is taken, by {owner}")
        kernel = without_autocast(fn)
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", remembered(first_of(shapes, kernel)), lib=_library)
        made = Op(name, fn, cost, flops, tuple(inspect.signature(fn).parameters), opaque, example=example)
        functools.update_wrapper(made, fn, updated=())
        OPS[made.overload] = made
        return made

    return register


def aten_name(target: Any) -> str:
    """Return the name of the ATen operator that a node calls, without its overload: "mm" for `aten.mm.default`.

    Args:
        target: the node's target. Anything but an ATen operator gives "".
    """
    return getattr(getattr(target, "overloadpacket", None), "__name__", "")


def returns_view(target: Any) -> bool:
    """Return whether a call's result shares memory with an argument, as that of `aten.view.default` does.

    Args:
        target: the target of a node of a joint, forward or backward graph.
    """
    aliases = isinstance(target, torch._ops.OpOverload) and any(
        returned.alias_info is not None for returned in target._schema.returns
    )
    return aliases or target is torch.ops.aten._unsafe_view.default


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed. Call it only for tensors on a GPU: CPU code never imports Triton."""
    return importlib.util.find_spec("triton") is not None


def formats(precision: str | None) -> tuple[str, ...]:
    """Return the providers' precisions that a user's choice allows, the preferred one first."""
    return ("fp8", "int8") if precision == "8bit" else () if precision is None else (precision,)


HALF = (torch.float16, torch.bfloat16)  #: the dtypes that templates support


def refuse_gpu(*tensors: torch.Tensor, made: torch.dtype | None = None, triton: bool = True) -> Note | None:
    """Return why a half-precision GPU kernel cannot take these tensors, or None. Most `refuses` begin with it.

    Args:
        tensors: of any shape, fake or real. All have to be on a GPU (`tunecompile.ir.pretend_gpu` may say so) and in
            fp16 or bf16.
        made: the dtype of the result, where that counts in the place of theirs: they are packed weights.
        triton: whether the kernel is a Triton template, so that Triton has to be installed.
    """
    if not all(map(on_gpu, tensors)):
        return note("not-on-gpu")
    dtypes = [made or tensor.dtype for tensor in tensors]
    if wide := [dtype for dtype in dtypes if dtype not in HALF]:
        return note("not-half-precision", detail=str(wide[0]).removeprefix("torch."))
    if any(dtype == torch.bfloat16 and not has_bfloat16(t.device) for dtype, t in zip(dtypes, tensors)):
        return note("gpu-without-bfloat16")
    return note("no-triton") if triton and not has_triton() else None


def refuse_spills(tensor: torch.Tensor) -> Note | None:
    """Return why a kernel that fills the registers of other GPUs cannot run where a tensor is, or None.

    Args:
        tensor: on AMD's cards with warps of 32 threads (RDNA) such kernels spill, as compiled for gfx1100.
    """
    narrow = torch.version.hip and tensor.is_cuda and warp_size(tensor.device) < 64
    return note("registers-spill") if narrow else None
