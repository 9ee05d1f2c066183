"""What transformers' functions mean, as ops, and whether a function on hand means that.

Dynamo traces `delta_rule` and `convolution`. `itself` is the function in whose place they stand, for calls that no op
has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tunecompile.ops import gated_delta_rule, short_convolution

__all__ = ["DOCUMENTS", "MEANINGS", "Documents", "Meaning", "agrees"]


class Documents:
    """Where documents of the row begin that a layer is traced with.

    An attribute and no argument, since a model's code hands on what it knows. It is set while Dynamo traces, and never
    when compiled code runs.
    """

    offsets: Tensor | None = None  #: int [S + 1]


DOCUMENTS = Documents()
EPS = 1e-6  #: of queries and keys of length 1, as fla has it, and transformers after it
BOUNDARIES = "cu_seq_lens_q"  #: what collators call the offsets of documents


@dataclass(frozen=True)
class Meaning:
    """An op for a function, and a call on which they have to agree."""

    make: Callable[[Callable], Callable]  #: (function) -> what is traced in its place
    example: Callable[[], tuple[Sequence[Any], dict[str, Any]]]  #: arguments of a call


def delta_rule(itself: Callable) -> Callable:
    """The gated delta rule, by chunks or by tokens."""

    def traced(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *args: Any, **kwargs: Any) -> Any:
        initial, offsets = kwargs.get("initial_state"), DOCUMENTS.offsets
        offsets = kwargs.get("cu_seqlens") if offsets is None else offsets
        if args or kwargs.get("scale") is not None or (offsets is not None and (initial is not None or len(query) > 1)):
            return itself(query, key, value, g, beta, *args, **kwargs)
        eps = EPS if kwargs.get("use_qk_l2norm_in_kernel", False) else 0.0
        made, state = gated_delta_rule(query, key, value, g, beta, initial, offsets, query.shape[-1] ** -0.5, eps)
        return made, state if kwargs.get("output_final_state", False) else None

    return traced


def convolution(itself: Callable) -> Callable:
    """A depthwise causal convolution of [B, C, T]."""

    def traced(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        offsets, alone = DOCUMENTS.offsets, True
        if offsets is None:  # what collators say is not looked at otherwise: Dynamo guards what it sees
            offsets = kwargs.get(BOUNDARIES)
            alone = kwargs.get("seq_idx") is None if offsets is None else len(hidden_states) == 1
        if activation not in (None, "silu", "swish") or not alone:
            return itself(hidden_states, weight, bias, activation=activation, **kwargs)
        made = short_convolution(hidden_states.transpose(1, 2), weight, bias, offsets, activation is not None)
        return made.transpose(1, 2)

    return traced


def _waves(*shape: int) -> Tensor:
    """Values that repeat nowhere, without a random number."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1, count + 1, dtype=torch.float32, device="cpu").square()).reshape(shape)


def _delta_example() -> tuple[Sequence[Any], dict[str, Any]]:
    decays, rates = -_waves(1, 5, 2).abs(), _waves(1, 5, 2).sigmoid()
    named = dict(g=decays, beta=rates, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True)
    return (_waves(1, 5, 2, 4) + 0.1, _waves(1, 5, 2, 4) - 0.3, _waves(1, 5, 2, 3)), named


def _convolution_example() -> tuple[Sequence[Any], dict[str, Any]]:
    return (_waves(2, 3, 6), _waves(3, 4), _waves(3)), dict(activation="silu")


MEANINGS = {  #: by the name of the function in plain PyTorch
    "torch_chunk_gated_delta_rule": Meaning(delta_rule, _delta_example),
    "causal_conv1d_fn": Meaning(convolution, _convolution_example),
}


@torch.no_grad()
def agrees(written: Callable, meaning: Meaning) -> bool:
    """Whether a function in plain PyTorch gives what its op gives, on one small call."""
    try:
        args, kwargs = meaning.example()
        expected = torch.utils._pytree.tree_leaves(written(*args, **kwargs))
        made = torch.utils._pytree.tree_leaves(meaning.make(written)(*args, **kwargs))
        return len(expected) == len(made) and all(map(_alike, made, expected))
    except Exception:  # other parameters, say
        return False


def _alike(made: Tensor, expected: Tensor) -> bool:
    return made.dtype == expected.dtype and torch.allclose(made, expected, rtol=1e-4, atol=1e-5)
