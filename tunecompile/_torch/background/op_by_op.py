"""A final graph, run op by op: what runs until there is code for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter

__all__ = ["draws_numbers", "run_op_by_op", "why_not_op_by_op"]

_HIGHER = "torch._higher_order_ops"  #: where operations on functions are defined
_RANDOM, _RANDINT = "prims::inductor_random", "prims::inductor_randint"
#: ops that Inductor puts in the place of random functions, and that run here as they are
_SEEDS = ("prims::inductor_seed", "prims::inductor_seeds", "prims::inductor_lookup_seed")


def run_op_by_op(gm: GraphModule, instead: Callable[[Any], Callable | None]) -> Callable[[list], Any]:
    """The graph as compiled code is called: with its inputs in a list, which it empties.

    Ops of ours run as their references, which need no kernel to be compiled. A backward draws the same random numbers
    as its forward did from the same seed, as compiled code does; torch's own function for that ignores the seed.

    Args:
        gm: a forward or backward graph. It has to stay as it is.
        instead: a call's target -> what runs in its place, if anything.
    """
    interpreter = _Seeded(gm, instead)

    def run(inputs: list) -> Any:
        with torch.no_grad():
            return interpreter.boxed_run(inputs)

    return run


def why_not_op_by_op(gm: GraphModule) -> str:
    """Why the graph would not run right, or as it should; empty where it would.

    Inductor may have further random ops, with seeds of a kind that is not known here. Operations on functions are run
    by torch without fusing them: `flex_attention` would make a score for each pair of tokens.
    """
    names = _names(gm) - {_RANDOM, _RANDINT, *_SEEDS}
    random = next((name for name in sorted(names) if name.startswith("prims::") and "rand" in name), "")
    if random:
        return f"{random} draws other numbers op by op"
    calls = (node for node in gm.graph.nodes if node.op == "call_function" and "kernel_idx" not in node.kwargs)
    higher = next((node.target for node in calls if type(node.target).__module__.startswith(_HIGHER)), None)
    return "" if higher is None else f"{higher} is not fused op by op"


def draws_numbers(gm: GraphModule) -> bool:
    """Whether the graph draws random numbers from seeds."""
    return bool(_names(gm) & {_RANDOM, _RANDINT})


def _names(gm: GraphModule) -> set[str]:
    return {_name(node.target) for node in gm.graph.nodes if node.op == "call_function"}


class _Seeded(Interpreter):
    """Draws random numbers from the seed that it is given."""

    def __init__(self, gm: GraphModule, instead: Callable[[Any], Callable | None]) -> None:
        super().__init__(gm)
        calls = {node.target for node in gm.graph.nodes if node.op == "call_function"}
        self.instead = {target: found for target in calls if (found := instead(target)) is not None}

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        name = _name(target)
        if name == _RANDOM:
            size, seed, mode = args
            make: Callable = torch.randn if mode == "randn" else torch.rand
            return make(size, generator=_generator(seed), device=seed.device, dtype=torch.float32)
        if name == _RANDINT:
            low, high, size, seed = args
            return torch.randint(low, high, size, generator=_generator(seed), device=seed.device)
        if target in self.instead:
            return self.instead[target](*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _generator(seed: torch.Tensor) -> torch.Generator:
    return torch.Generator(seed.device).manual_seed(int(seed))


def _name(target: Any) -> str:
    return getattr(getattr(target, "_schema", None), "name", "")
