"""A recorder without a GPU: operations are replayed with the memory and the numbers that they had when recorded.

Layers run by their own code in it: Dynamo compiles nothing while operations are looked at.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

#: operations by which the host asks for a value, or for how many there are
ASK = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2", "bincount")


class _Operations(TorchDispatchMode):
    """Those that run, but for views, which stay views of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple, dict, Any]] = []  #: with their outputs, where these are new memory

    @torch.compiler.disable
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        by_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        if name in ASK or by_mask:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        output = func(*args, **kwargs)
        writes = any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments)
        if writes or all(each.alias_info is None for each in func._schema.returns):
            self.calls.append((func, args, kwargs, () if writes else output))
        return output


class Frozen:
    """Records as a CUDA graph does, but that the operations run once while they are recorded.

    So the first replay does nothing. What the host computes in each later one is what it computed then.
    """

    device = "cpu"

    def __init__(self) -> None:
        self.replays = self.records = 0

    def record(self, run: Callable[[], Sequence[Tensor]], pool, device) -> tuple[Sequence[Tensor], Callable]:
        self.records += 1
        with _Operations() as operations:
            outputs = run()
        before = self.replays

        @torch.no_grad()
        def play() -> None:
            self.replays += 1
            if self.replays == before + 1:
                return
            for func, args, kwargs, memory in operations.calls:
                values = pytree.tree_leaves(func(*args, **kwargs))
                for held, value in zip(pytree.tree_leaves(memory), values, strict=False):
                    if isinstance(held, Tensor):
                        held.copy_(value)

        return outputs, play
