"""What surrounds the calls of one module: between engines' adapters and the slots of layers and heads.

An engine moves, gathers or frees a module's weights around its calls, by hooks that Dynamo skips: a graph would end at
each of them. The adapter of an engine (`accelerate`, `deepspeed`, `fsdp`) finds out what the engine does with a module,
and returns a `LayerHost`, or None where the engine has nothing to do with it. The slot then calls compiled code through
its host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[[tuple, dict[str, Any]], Any]  #: (positional, keyword arguments) -> the module's output


@dataclass(frozen=True)
class LayerHost:
    """An engine's work around one module's calls. Adapters override the parts in which their engine does something.

    A call of a layer goes through `around` once, and inside it through `call`, again after memory ran out.
    """

    layer: nn.Module  #: a layer, or a head
    engine = ""  #: for the report
    refused = ""  #: why the module has to run as it is; empty where it can be compiled
    alone = False  #: whether all communication is in `around`, so that a rank may repeat `call` alone
    weights_stay = True  #: whether the weights are this process's alone, and stay where they are between calls
    #: whether a head's `call` belongs around the loss, where its weight is read, instead of around its own call
    gathers_for_loss = False

    def around(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A whole call: the part of the engine's work that must not be repeated, with `run` between its two halves.

        Args:
            run: calls the layer, by `call`; it is repeated when memory runs out, where `alone`.
            args, kwargs: of the call.

        Returns:
            The layer's output, as the engine returns it.
        """
        return run(args, kwargs)

    def call(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> Any:
        """One run of the compiled code: the rest of the engine's work, and no hook of the engine inside `run`.

        Args:
            run: the compiled code.
            args, kwargs: of the call.

        Returns:
            The output of `run`, as the engine returns it.
        """
        return run(args, kwargs)

    def product_dtype(self, hidden: Tensor) -> torch.dtype:
        """The dtype in which a head multiplies these hidden states by its weight, outside autocast."""
        return torch.promote_types(hidden.dtype, self.layer.weight.dtype)

    def has_other_hooks(self) -> bool:
        """Whether the module has hooks that are not the engine's, which would not run where the engine's do."""
        return False

    def release(self) -> None:
        """Undo what finding this host changed of the module, at `restore`."""
