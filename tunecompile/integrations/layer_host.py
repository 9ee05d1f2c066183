"""The protocol between engines' adapters and the slots of layers and heads: what surrounds the calls of one module.

An engine moves, gathers or frees a module's weights around its calls, by hooks that Dynamo skips: a graph would end at
each of them. The adapter of an engine (`accelerate`, `deepspeed`, `fsdp`) finds out what the engine does with a module,
and returns a `LayerHost`, or None where the engine has nothing to do with it. The slot then calls compiled code through
its host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Run = Callable[[tuple, dict[str, Any]], Any]  #: (positional, keyword arguments) -> the module's output


@runtime_checkable
class LayerHost(Protocol):
    """An engine's work around one module's calls.

    A call of a layer goes through `around` once, and inside it through `call`, again after memory ran out.
    """

    @property
    def layer(self) -> nn.Module:
        """The module: a layer, or a head."""
        ...

    @property
    def engine(self) -> str:
        """The engine's name, for the report."""
        ...

    @property
    def refused(self) -> str:
        """Why the module has to run as it is; empty where it can be compiled."""
        ...

    @property
    def alone(self) -> bool:
        """Whether all communication is in `around`, so that a rank may repeat `call` alone when memory runs out."""
        ...

    @property
    def weights_stay(self) -> bool:
        """Whether the weights belong to this process alone, and stay where they are between calls."""
        ...

    @property
    def gathers_for_loss(self) -> bool:
        """Whether a head's `call` belongs around the loss, where its weight is read, instead of around its own call."""
        ...

    def around(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A whole call: the part of the engine's work that must not be repeated, with `run` between its two halves.

        Args:
            run: calls the layer, by `call`; it is repeated when memory runs out, where `alone`.
            args: of the call.
            kwargs: of the call.

        Returns:
            The layer's output, as the engine returns it.
        """
        ...

    def call(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> Any:
        """One run of the compiled code: the rest of the engine's work, and no hook of the engine inside `run`.

        Args:
            run: the compiled code.
            args: of the call.
            kwargs: of the call.

        Returns:
            The output of `run`, as the engine returns it.
        """
        ...

    def product_dtype(self, hidden: Tensor) -> torch.dtype:
        """The dtype in which a head multiplies these hidden states by its weight, outside autocast."""
        ...

    def has_other_hooks(self) -> bool:
        """Whether the module has hooks that are not the engine's."""
        ...

    def release(self) -> None:
        """Undo what finding this host changed of the module, at `restore`."""
        ...


@dataclass(frozen=True)
class HostDefaults:
    """A host of an engine that does nothing; adapters override the methods in which their engine does something."""

    layer: nn.Module
    engine = ""
    refused = ""
    alone = False
    weights_stay = True
    gathers_for_loss = False

    def around(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`run` by itself."""
        return run(args, kwargs)

    def call(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`run` by itself."""
        return run(args, kwargs)

    def product_dtype(self, hidden: Tensor) -> torch.dtype:
        """As torch promotes both."""
        return torch.promote_types(hidden.dtype, self.layer.weight.dtype)

    def has_other_hooks(self) -> bool:
        """Of no interest where the engine's hooks run around the call."""
        return False

    def release(self) -> None:
        """Nothing was changed."""
