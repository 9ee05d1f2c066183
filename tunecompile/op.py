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
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import inspect
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import torch

from tunecompile._torch import no_autocast
from tunecompile.errors import InvalidOp, NoSecondDerivative
from tunecompile.signature import remembered

NAMESPACE = "tunecompile"
_library = torch.library.Library(NAMESPACE, "DEF")


class Cost(enum.Enum):
    """What recomputing an op costs, which is what the planner decides by."""

    POINTWISE = "recompute"  #: memory-bound: never worth saving
    MATMUL = "save"  #: compute-bound: never recomputed while memory lasts


@dataclass(frozen=True)
class Provider:
    """One way to run an op. `refuses(*args)` sees fake tensors and gives a reason, or None; `run` is traced into the graph.

    `because` says what is gained over the reference, with what was measured where it was; the report shows it. A provider with a
    `precision` is less exact than the op's meaning, and taken only where the user asked for that precision.
    """

    name: str
    run: Callable
    refuses: Callable[..., str | None]
    precision: str | None = None
    because: str = ""

    def supports(self, *args: Any) -> bool:
        return self.refuses(*args) is None


@dataclass
class Op:
    """A registered op. Call it like the function it was made from."""

    name: str
    reference: Callable
    cost: Cost
    flops: Callable[..., int] | None
    parameters: tuple[str, ...]
    opaque: bool = False
    providers: list[Provider] = field(default_factory=list)
    backward_op: "Op | None" = None
    tiled: "Op | None" = None  #: the first output alone, in pieces: an op of the same parameters and `tiles`, whose backward saves only these


    @property
    def overload(self) -> torch._ops.OpOverload:
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    def __call__(self, *args, **kwargs):
        return self.overload(*args, **kwargs)

    def provider(self, name: str, supports: Callable[..., bool] | None = None, refuses: Callable[..., str | None] | None = None,
                 precision: str | None = None, because: str = "") -> Callable:
        """Register a provider with the parameters of the reference; the first that supports the arguments is taken.

        `refuses` is `supports` with a reason, which the report shows where none is taken. One that also takes the keyword
        `used` is told which of its outputs are read, and may give None for the others; one that takes `dying`, which parameters
        are products that this graph makes and only this call reads: what it makes may take their place.
        """

        def register(run: Callable) -> Callable:
            parameters = inspect.signature(run).parameters.values()
            got = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
            if got != self.parameters:
                raise InvalidOp(name=self.name, reason=f"provider {name!r} takes {got}, the reference takes {self.parameters}")
            why_not = refuses or (lambda *args: None if supports(*args) else "its arguments are not supported")
            self.providers.append(Provider(name, run, why_not, precision, because))
            return run

        return register

    def choose(self, args: Sequence[Any], precision: str | None = None) -> Provider:
        """The first provider that supports `args` (fake tensors and constants), else the reference itself; those of the
        precision that was asked for come first."""
        for wanted in dict.fromkeys((precision, None)):
            for provider in self.providers:
                if provider.precision == wanted and provider.supports(*args):
                    return provider
        return self.fallback()

    def refusals(self, args: Sequence[Any], precision: str | None) -> dict[str, str]:
        """Why each provider of this precision (None: of the model's own) does not run these arguments, by its name."""
        asked = [provider for provider in self.providers if provider.precision == precision]
        return {provider.name: reason for provider in asked if (reason := provider.refuses(*args)) is not None}

    def fallback(self) -> Provider:
        """The reference as a provider."""
        return Provider("reference", self.reference, lambda *_: None)

    def backward(self, saves: Sequence[str], gives: Sequence[str | tuple[str, ...]], outputs: int = 1, cost: Cost | None = None,
                 flops: Callable[..., int] | None = None) -> Callable:
        """Register the backward, an op of its own: `(*gradients, *saves) -> [gradient of each of `gives`]`.

        `saves` names inputs of the op, or `out0`, `out1`, ... for its outputs; the first `outputs` outputs are differentiable.
        An input of type Tensor[] gives as many gradients as it has members; inputs in a tuple share one gradient. Gradients
        nobody needs are removed as dead code after lowering.
        """

        def register(fn: Callable) -> Op:
            self.backward_op = op(cost=cost or self.cost, flops=flops)(fn)
            if self.backward_op.parameters[outputs:] != tuple(saves):
                raise InvalidOp(name=self.name, reason=f"backward takes {self.backward_op.parameters[outputs:]}, saves are {tuple(saves)}")
            _refuse_second_derivative(self.backward_op)
            _register_autograd(self, tuple(saves), tuple((g,) if isinstance(g, str) else g for g in gives), outputs)
            return self.backward_op

        return register


OPS: dict[Any, Op] = {}  #: the one registry: torch overload -> Op


def op(cost: Cost, flops: Callable[..., int] | None = None, opaque: bool = False) -> Callable[[Callable], Op]:
    """Register a function as a semantic op. Its annotations become the schema; it must not mutate or alias its inputs.

    An `opaque` op is never traced into the graph: it is called as it is (a loop over chunks once a step, say).
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
    """Of an ATen call, without its overload; "" for what is none."""
    return getattr(getattr(target, "overloadpacket", None), "__name__", "")


def returns_view(target: Any) -> bool:
    """Whether what this call returns lies in the memory of what it is given."""
    aliases = isinstance(target, torch._ops.OpOverload) and any(returned.alias_info is not None for returned in target._schema.returns)
    return aliases or target is torch.ops.aten._unsafe_view.default


@functools.cache
def has_triton() -> bool:
    """Whether templates can be imported. Ask only where a tensor is on a GPU: on a CPU Triton is never imported."""
    return importlib.util.find_spec("triton") is not None


HALF = (torch.float16, torch.bfloat16)


def refuse_gpu(*tensors: torch.Tensor, triton: bool = True) -> str | None:
    """Why a GPU's kernel in half precision cannot take these tensors, if it cannot."""
    if not all(t.is_cuda for t in tensors):
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


def _register_autograd(forward: Op, saves: tuple[str, ...], gives: tuple[tuple[str, ...], ...], differentiable: int) -> None:
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
