"""4-bit weights that bitsandbytes would change in a forward: to a form without a trace or without a gradient."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tunecompile._torch.known_bugs import PACKED_FOR_EVALUATION
from tunecompile.notes import Note, note
from tunecompile.ops import dequantize_4bit
from tunecompile.ops.nf4 import CODES

STATE = "quant_state"  #: where bitsandbytes keeps the quantisation state, on the weight and on the module
PACKS = "support_avx512bf16_for_cpu"  #: of its linears: whether one packs its weight in an evaluation on this CPU


@dataclass(frozen=True)
class PackedStates:
    """Gives a layer's gathered 4-bit weights their quantisation state: by a hook, and where no hook is called."""

    put_back: Callable[[], None]
    hook: RemovableHandle


def put_states_back(layer: nn.Module) -> PackedStates | None:
    """Give a layer's 4-bit weights their quantisation state behind the engine's own hook, in every call from now on.

    FSDP2 gives a layer plain parameters, without the state that bitsandbytes keeps beside a packed weight. Its linear
    then makes a weight that has it, in its forward: Dynamo cannot trace that, and a graph would end at each linear.
    FSDP2 also does so before a layer's backward, where a repetition of its forward calls no hooks.

    Returns:
        The function, which every call makes. None where no weight is both sharded and packed, or bitsandbytes has no
        such function any more.
    """
    modules = [
        module
        for module in layer.modules()
        if vars(module).get(STATE) is not None and hasattr(module._parameters.get("weight"), "device_mesh")
    ]
    if not modules:
        return None
    from bitsandbytes.nn import modules as of

    put_back = getattr(of, "fix_4bit_weight_quant_state_from_module", None)
    if put_back is None:
        return None

    def put_all_back() -> None:
        for module in modules:
            put_back(module)

    @torch.compiler.disable
    def gathered(_: nn.Module, args: Any) -> None:
        put_all_back()

    return PackedStates(put_all_back, layer.register_forward_pre_hook(gathered))


def keep_unpacked(model: nn.Module) -> list[nn.Module]:
    """Have evaluations leave the 4-bit weights as they are; `may_pack` undoes it.

    Returns:
        The linears that would have packed their weights.
    """
    found = [module for module in model.modules() if vars(module).get(PACKS)] if PACKED_FOR_EVALUATION.present else []
    for module in found:
        setattr(module, PACKS, False)
    return found


def may_pack(module: nn.Module) -> None:
    """Undo `keep_unpacked` for one linear."""
    setattr(module, PACKS, True)


def is_packed(state: Any) -> bool:
    """Whether the weight of this quantisation state was packed for evaluations on a CPU."""
    return bool(getattr(state, "packing_format_for_cpu", False))


def note_packed(model: nn.Module) -> list[Note]:
    """A note about weights that were evaluated on such a CPU before `optimize`."""
    packed = sum(is_packed(getattr(parameter, STATE, None)) for parameter in model.parameters())
    return [note("packed-for-evaluation", count=packed)] if packed else []


def is_readable(weight: Tensor, state: Any) -> bool:
    """Whether a weight with this quantisation state is packed as `dequantize_4bit` reads it."""
    if (
        state is None
        or state.quant_type not in CODES
        or len(state.shape) < 2
        or math.prod(state.shape) % state.blocksize
        or weight.shape[0] == 1
    ):
        return False
    return not state.nested or (state.state2.blocksize == 256 and state.state2.code is not None)


def from_4_bits(weight: Tensor, state: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A packed weight in floating point, by an op; without a compiler by the provider that it would choose.

    dtype: of the values; None for the state's.

    (bitsandbytes adds a double quantisation's offset in place, and no pattern is matched across a mutation.)
    """
    traced = torch.compiler.is_compiling()
    packed = weight if traced else weight.data
    packed = packed if weight.dtype == torch.uint8 else packed.view(torch.uint8).reshape(-1, 1)
    outer = (state.state2.code, state.state2.absmax, state.offset) if state.nested else (None, None, None)
    rows, columns = math.prod(state.shape[:-1]), state.shape[-1]
    args = (packed, state.absmax, *outer, rows, columns, state.blocksize, state.quant_type, dtype or state.dtype)
    value = dequantize_4bit(*args) if traced else dequantize_4bit.choose(args).run(*args)
    return value if len(state.shape) == 2 else value.view(state.shape)


def values_of(weight: Tensor, state: Any) -> Tensor:
    """The values that the codes of a 4-bit weight of any shape represent.

    They are computed by bitsandbytes, so that ops can be judged by them. A block is a row here
    (known_bugs.BLOCKS_ACROSS_ROWS), or all is one row where the last block is not full.
    """
    from bitsandbytes.functional import dequantize_4bit

    by_block, size = copy.copy(state), math.prod(state.shape)
    by_block.shape = torch.Size((size,) if size % state.blocksize else (size // state.blocksize, state.blocksize))
    return dequantize_4bit(weight.data.reshape(-1, 1), by_block).reshape(state.shape)
