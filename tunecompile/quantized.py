"""4-bit weights that an engine gathers from shards: their quantisation state is put back before Dynamo sees the layer.

FSDP2 gives a layer plain parameters, without what bitsandbytes keeps beside a packed weight. Its linear then makes a weight that has it, in its forward:
Dynamo cannot follow that, and a graph would end at each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

STATE = "quant_state"  #: where bitsandbytes keeps it, on the weight and on the module


def put_states_back(layer: nn.Module) -> RemovableHandle | None:
    """Have it done behind the engine's own hook of this layer, from now on. None where no weight is sharded and packed."""
    modules = [module for module in layer.modules() if vars(module).get(STATE) is not None and hasattr(module._parameters.get("weight"), "device_mesh")]
    if not modules:
        return None
    from bitsandbytes.nn.modules import fix_4bit_weight_quant_state_from_module as put_back

    @torch.compiler.disable
    def gathered(_: nn.Module, args: Any) -> None:
        for module in modules:
            put_back(module)

    return layer.register_forward_pre_hook(gathered)
