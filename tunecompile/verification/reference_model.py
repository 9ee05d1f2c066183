"""A second copy of a model, eager or in high precision, in little more memory than one layer takes.

A twin has new modules around the same frozen weights, and trained weights of its own. Its layers are checkpointed, and
hold their weights in another precision only while they run.

Eager with frozen products in 8 bits (`round_products`) is the yardstick of a model that is optimized for them. It is
written apart from `tunecompile.ops.eight_bits`, whose faults it is to find: rows are rounded where a frozen layer under
an adapter reads them, and gradients where they reach it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tunecompile._torch.autograd import plain_functions
from tunecompile._torch.modules import linear, reparametrized
from tunecompile.errors import CannotVerify, summary
from tunecompile.integrations.bitsandbytes import values_of
from tunecompile.integrations.packed_experts.stacks import packed_stacks, set_dtype
from tunecompile.integrations.peft.parametrize import trace_or_skip
from tunecompile.integrations.registered.names import unregistered
from tunecompile.integrations.transformers import without_cache
from tunecompile.ir.op import formats
from tunecompile.ops.eight_bits import FORMATS, EightBits
from tunecompile.runtime.layers.find_layers import find_layers


class Float64(TorchFunctionMode):
    """A mode under which model code gets fp64 where it requests fp32.

    Model code casts to fp32 for precision (norms, softmax, loss), or makes tensors of the default dtype.
    """

    def __enter__(self):
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        torch.set_default_dtype(self.default)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Run a function with fp64 in place of fp32."""

        def wider(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        elif function in (torch._grouped_mm, getattr(nn.functional, "grouped_mm", None)):
            function = _grouped_mm
        return function(*map(wider, args), **{key: wider(value) for key, value in (kwargs or {}).items()})


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The product of rows with the matrix of their group, in any dtype: torch's has no fp64.

    Args:
        a: [T, K], rows.
        b: [G, K, N], a matrix for each group.
        offs: [G], int32, the row where each group ends; None multiplies `a` and `b` one by one.
        bias: [G, N].
        out_dtype: ignored.

    Returns:
        [T, N]; rows beyond the last group are zero.
    """
    if offs is None:
        return a @ b
    begins, made = 0, []
    for group, ends in enumerate(offs.tolist()):
        rows = a[begins:ends] @ b[group]
        made.append(rows if bias is None else rows + bias[group])
        begins = ends
    return torch.cat([*made, a.new_zeros(len(a) - begins, b.shape[-1])])


def mode(dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    """A context in which model code computes in `dtype`."""
    return Float64() if dtype is torch.float64 else contextlib.nullcontext()


def twin_of(model: nn.Module, dtype: torch.dtype | None, checkpointed: bool = True) -> nn.Module:
    """The same model, not optimized, around the same frozen weights.

    Args:
        model: to copy.
        dtype: that layers hold their weights in while they run, and other modules for good; None leaves all as they
            are.
        checkpointed: whether layers are checkpointed.

    Returns:
        The twin.

    Raises:
        CannotVerify: the model cannot be copied.
    """
    twin = _copy(model)
    unregistered(twin)
    for module in twin.modules():
        if getattr(module, "gradient_checkpointing", None) is True:
            module.gradient_checkpointing = False  # layers are checkpointed here
    layers = [layer for stack in find_layers(twin) for layer in stack.members]
    if dtype is not None:
        _dequantize(twin, dtype)
        _widen(twin, {id(p) for layer in layers for p in layer.parameters()}, dtype)
    for layer in layers:
        layer.forward = functools.partial(_layer, layer, layer.forward, dtype, checkpointed)
    return twin


def _copy(model: nn.Module) -> nn.Module:
    """New modules around the same frozen weights.

    Raises:
        CannotVerify: the model cannot be copied.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    bound = (type(None), types.MethodType, functools.partial)  # a copy binds these to itself
    for name, module in model.named_modules():
        if not isinstance(vars(module).get("forward"), bound):
            raise CannotVerify(
                reason=f"the forward of {name or 'the model'} was replaced by a function that knows this object. "
                "Verify before that"
            )
    try:
        twin = copy.deepcopy(model, memo).train(model.training)
    except Exception as error:
        raise CannotVerify(reason=f"the model cannot be copied: {summary(error)}") from error
    copies = {id(module): twin.get_submodule(name) for name, module in model.named_modules(remove_duplicate=False)}
    for module in twin.modules():
        if isinstance(method := vars(module).get("forward"), types.MethodType):
            module.forward = types.MethodType(_rebound(method.__func__, copies), module)
    if "_original_forward" in vars(twin):  # accelerate's, which puts an autocast around it
        twin.forward = twin._original_forward
    return twin


def _rebound(value: Any, copies: dict[int, nn.Module]) -> Any:
    """A function whose closure calls methods of modules, or such a method, over those of their copies.

    TRL's forward, which scores tokens, calls the forward that stood there before, which is the original's.
    """
    if isinstance(value, types.MethodType) and id(value.__self__) in copies:
        return types.MethodType(_rebound(value.__func__, copies), copies[id(value.__self__)])
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    cells = []
    for cell in value.__closure__:
        try:
            held = cell.cell_contents
        except ValueError:  # an empty one
            held = value
        cells.append(cell if held is value else types.CellType(_rebound(held, copies)))
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
    made.__kwdefaults__ = value.__kwdefaults__
    return made


def _layer(
    layer: nn.Module, forward: Callable, dtype: torch.dtype | None, checkpointed: bool, *args: Any, **kwargs: Any
) -> Any:
    """Run a layer with its frozen weights in `dtype`, checkpointed or not."""

    def run(*args: Any, **kwargs: Any) -> Any:
        # As parameters: PEFT's wrapper of experts would restore a buffer otherwise, which stays when the layer is
        # recomputed.
        wide = {
            name: nn.Parameter(p.to(dtype), requires_grad=False)
            for name, p in layer.named_parameters()
            if dtype is not None and _is_plain(p)
        }
        # The mode is entered here, since another thread recomputes the layer.
        with mode(dtype), reparametrized(layer, wide):
            return forward(*args, **kwargs)

    args, kwargs = without_cache(args, kwargs)
    return checkpoint(run, *args, use_reentrant=False, **kwargs) if checkpointed else run(*args, **kwargs)


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether a parameter is frozen, and not quantized."""
    return not parameter.requires_grad and type(parameter) is nn.Parameter and parameter.is_floating_point()


@torch.no_grad()
def _widen(twin: nn.Module, inside: set[int], dtype: torch.dtype) -> None:
    """Convert trained parameters, buffers, and frozen parameters outside of the layers to `dtype`.

    A parameter that two modules share stays shared.
    """
    made: dict[int, nn.Parameter] = {}
    for module in twin.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
            elif id(parameter) not in inside and _is_plain(parameter):
                wide = made.setdefault(id(parameter), nn.Parameter(parameter.detach().to(dtype), requires_grad=False))
                module._parameters[name] = wide
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _dequantize(twin: nn.Module, dtype: torch.dtype) -> None:
    """Let 4-bit linears and experts compute with their dequantised values."""
    widen_stacks(twin, dtype)
    with contextlib.suppress(ImportError):
        import bitsandbytes as bnb

        for path, module in list(twin.named_modules()):
            if isinstance(module, bnb.nn.Linear4bit) and not list(module.children()):
                parent, _, name = path.rpartition(".")
                setattr(twin.get_submodule(parent), name, _Dequantized(module, dtype))


def widen_stacks(model: nn.Module, dtype: torch.dtype) -> None:
    """Let 4-bit stacks of experts have their values in `dtype`, and all their adapters, whatever runs them.

    bitsandbytes has no fp64 (known_bugs.DEQUANTIZED_IN_FP64), and PEFT leaves adapters out (ADAPTED_4_BIT_STACKS).
    """
    packed = [module for module in model.modules() if packed_stacks(module)]
    for module in packed:
        set_dtype(module, dtype)
    if packed:
        trace_or_skip(model)


class _Dequantized(nn.Module):
    """A frozen 4-bit linear that computes with its dequantised values in `dtype`."""

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.packed, self.bias, self.dtype = module.weight, module.bias, dtype
        self.in_features, self.out_features = module.in_features, module.out_features

    @property
    def weight(self) -> Tensor:
        """The dequantised values, for whoever else reads them: PEFT takes their norm (DoRA)."""
        with plain_functions():  # `Float64` would request fp64: known_bugs.DEQUANTIZED_IN_FP64
            return values_of(self.packed, self.packed.quant_state).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The product with the dequantised weight."""
        return linear(x, self.weight, None if self.bias is None else self.bias.to(self.dtype))


#: times what rounding is off by. Weights keep their values, so that packed ones need not be read: theirs would be off
#: by as much, independently, which makes a factor of sqrt(2); the rest is the scatter of parameters on one batch
SLACK = 3.0


def format_on(precision: str | None, dtype: torch.dtype, device: torch.device) -> EightBits | None:
    """Return the format of 8 bits that a precision means for activations of a dtype, or None."""
    like = torch.empty(0, dtype=dtype, device=device)
    named = {eight.name: eight for eight in FORMATS}
    return next((named[name] for name in formats(precision) if named[name].refuses(like) is None), None)


def round_products(model: nn.Module, eight: EightBits) -> nn.Module:
    """Have the frozen layers under adapters of an eager model round what they read, and their gradients; return it."""
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module) and not any(p.requires_grad for p in base.parameters(recurse=False)):
            base.register_forward_pre_hook(lambda _, args: (_forward(args[0], eight), *args[1:]))
            base.register_forward_hook(lambda _, args, out: _Backward.apply(out, eight))
    return model


def _forward(x: Tensor, eight: EightBits) -> Tensor:
    """x, rounded; its gradient is passed on as it is. (An embedding reads integers.)"""
    return x + (_rounded(x, eight) - x).detach() if x.is_floating_point() else x


class _Backward(torch.autograd.Function):
    """A result as it is, whose gradient is rounded."""

    @staticmethod
    def forward(context: Any, y: Tensor, eight: EightBits) -> Tensor:
        context.eight = eight
        return y.view_as(y)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _rounded(grads[0], context.eight), None


def _rounded(x: Tensor, eight: EightBits) -> Tensor:
    """x, off by `SLACK` times what 8 bits with a scale for each row are off by."""
    values = x.detach().float()
    largest = values.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    if eight.name == "int8":
        near = (values * (127 / largest)).round() * (largest / 127)
    else:
        near = (values * (448 / largest)).to(torch.float8_e4m3fn).float() * (largest / 448)
    return (values + SLACK * (near - values)).to(x.dtype)
