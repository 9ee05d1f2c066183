"""4-bit stacks of a module, and their values as an op of the graph.

bitsandbytes' parametrisation dequantises a stack at every read, in code that Dynamo would trace anew for each layer:
torch gives each parametrised module a class of its own, and Dynamo guards on classes. So the module's forward is traced
with the op's results in place of its parameters (`tunecompile.integrations.peft.experts`), and guards on such classes
are left out. Which stacks a module has, and in which form, other guards say.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tunecompile._torch.fake_tensors import is_fake
from tunecompile.integrations.bitsandbytes import from_4_bits, is_readable

DEQUANTISES = "Bnb4bitParametrization"  #: bitsandbytes' class
HOOK_MODULE = "bitsandbytes.nn.parametrize"  #: where it is, with the hooks that go with it


class Dequantiser(nn.Module):
    """A parametrisation in the place of bitsandbytes' own; its `quant_state` has the values' shape and dtype."""

    quant_state: Any

    def is_readable(self, codes: Tensor) -> bool:
        """Whether the op can read the codes."""
        return is_readable(codes, self.quant_state)


def packed_stacks(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's parameters that are kept in 4 or 8 bits; of those alone that an op can read."""
    if not isinstance(module, nn.Module) or not parametrize.is_parametrized(module):
        return ()
    chains = module.parametrizations
    return tuple(name for name in chains if _is_packed(chains[name]))


def _is_packed(chain: Any) -> bool:
    if len(chain) != 1 or not _dequantises(chain[0]):
        return False
    made, original = chain[0], getattr(chain, "original", None)
    state = getattr(made, "quant_state", None)
    if not is_plain(original) or len(getattr(state, "shape", ())) != 3:
        return False
    return made.is_readable(original) if isinstance(made, Dequantiser) else is_readable(original, state)


def is_plain(parameter: Any) -> bool:
    """Whether a parameter is one of torch's own, or fake, or the shard of one: FSDP2 gathers it before a call."""
    return type(parameter) is nn.Parameter or is_fake(parameter) or is_shard(parameter)


def is_shard(parameter: Any) -> bool:
    """Whether a parameter is sharded. Dynamo traces this."""
    return hasattr(parameter, "placements")


def _dequantises(parametrisation: nn.Module) -> bool:
    kind = type(parametrisation)
    return (kind.__module__, kind.__name__) == (HOOK_MODULE, DEQUANTISES) or issubclass(kind, Dequantiser)


def scales_of(model: nn.Module) -> list[Tensor]:
    """The scales of a model's 4-bit stacks, which are neither parameters nor buffers of it."""
    states = [module.quant_state for module in model.modules() if _dequantises(module)]
    holders = [each for state in states for each in (state, getattr(state, "state2", None)) if each is not None]
    return [value for holder in holders for value in vars(holder).values() if isinstance(value, Tensor)]


def unpacked(module: nn.Module, name: str) -> Tensor:
    """The values of one 4-bit stack, by an op; they have no gradient. Dynamo traces this."""
    chain = module.parametrizations[name]
    made = chain[0]
    return made(chain.original) if isinstance(made, Dequantiser) else from_4_bits(chain.original, made.quant_state)


def plain_copy(module: nn.Module) -> nn.Module:
    """A copy of a module with 4-bit stacks, without hooks, that holds their values on the CPU in fp32.

    Its other parameters and its submodules are the module's own.
    """
    names = packed_stacks(module)
    plain = class_of(module).__new__(class_of(module))
    for name, value in vars(module).items():
        if name != "forward":
            vars(plain)[name] = (
                type(value)() if name.endswith("hooks") else dict(value) if type(value) is dict else value
            )
    values = {name: unpacked(module, name).to("cpu", torch.float32) for name in names}
    plain._parameters |= {name: nn.Parameter(value, requires_grad=False) for name, value in values.items()}
    plain._modules.pop("parametrizations")
    return plain


def is_partly_packed(module: nn.Module) -> bool:
    """Whether bitsandbytes parametrises the module in a form that is not known here, or others do beside it."""
    chains = module.parametrizations.values() if parametrize.is_parametrized(module) else ()
    found = [_dequantises(each) for chain in chains for each in chain]
    return any(found) and len(found) != len(packed_stacks(module))


def set_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Have the module's 4-bit stacks dequantised to this dtype."""
    for name in packed_stacks(module):
        made = module.parametrizations[name][0]
        made.quant_state = copy.copy(made.quant_state)
        made.quant_state.dtype = dtype


def class_of(module: nn.Module) -> type:
    """The module's class, without what parametrisations made of it."""
    return parametrize.type_before_parametrizations(module)


def guards_of_all(guards: Sequence[Any]) -> list[bool]:
    """Which of Dynamo's guards hold for all layers.

    Left out are those on the class that a module with 4-bit stacks has alone, and on the numbers of hooks that are
    called after errors, too, as bitsandbytes' are.

    Args:
        guards: as torch.compile's option `guard_filter_fn` gets them.
    """
    return [
        not (guard.guard_type == "TYPE_MATCH" and _has_packed_alone(guard.value))
        and "._forward_hooks_always_called" not in guard.name
        for guard in guards
    ]


def _has_packed_alone(module: Any) -> bool:
    names = packed_stacks(module)
    return bool(names) and len(names) == len(module.parametrizations)
