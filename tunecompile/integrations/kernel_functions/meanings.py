"""What transformers' functions mean, as ops, and whether a function on hand means that.

Dynamo traces what `delta_rule`, `convolution` and the others here give. `itself` is the function in whose place that
stands, for calls that no op has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tunecompile._torch.autograd import no_autocast
from tunecompile.ops import (
    branch_rows,
    channel_delta_rule,
    first_copies,
    gated_delta_rule,
    selective_scan,
    short_convolution,
    ssd_scan,
)


class Documents:
    """Where documents of the row begin that a layer is traced with.

    An attribute and no argument, since a model's code hands on what it knows. It is set while Dynamo traces, and never
    when compiled code runs.
    """

    def __init__(self) -> None:
        #: int [S + 1]. Its own from the start: Dynamo guards that it is not, and compiled code makes it so
        self.offsets: Tensor | None = None
        #: where rows share tokens, of which offsets say nothing: what `ops.branch_rows` is given beside these
        self.rows: tuple[Tensor, Tensor, Tensor] | None = None


DOCUMENTS = Documents()
EPS = 1e-6  #: of queries and keys of length 1, as fla has it, and transformers after it
BOUNDARIES = "cu_seq_lens_q"  #: what collators call the offsets of documents


def _in_rows(tokens: Tensor) -> Tensor:
    """[B, T, ...] as a recurrence reads it: of whole rows, where they share tokens."""
    return tokens if DOCUMENTS.rows is None else branch_rows(tokens, *DOCUMENTS.rows)


def _of_tokens(made: Tensor) -> Tensor:
    """What a recurrence made, for the tokens that it was given."""
    return made if DOCUMENTS.rows is None else first_copies(made, *DOCUMENTS.rows[:2])


@dataclass(frozen=True)
class Meaning:
    """An op for a function, and a call on which they have to agree."""

    make: Callable[[Callable], Callable]  #: (function) -> what is traced in its place
    example: Callable[[], tuple[Sequence[Any], dict[str, Any]]]  #: arguments of a call


def _one_decay(*args: Any) -> Any:
    return gated_delta_rule(*args)


def _decays_of_channels(*args: Any) -> Any:
    return channel_delta_rule(*args)


def delta_rule(itself: Callable, rule: Callable = _one_decay) -> Callable:
    """The gated delta rule, by chunks or by tokens. rule: calls its op, which Dynamo takes from no closure itself."""

    def traced(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *args: Any, **kwargs: Any) -> Any:
        initial, offsets = kwargs.get("initial_state"), DOCUMENTS.offsets
        offsets = kwargs.get("cu_seqlens") if offsets is None else offsets
        if args or kwargs.get("scale") is not None or (offsets is not None and (initial is not None or len(query) > 1)):
            return itself(query, key, value, g, beta, *args, **kwargs)
        eps = EPS if kwargs.get("use_qk_l2norm_in_kernel", False) else 0.0
        given = (_in_rows(each) for each in (query, key, value, g, beta))
        made, state = rule(*given, initial, offsets, query.shape[-1] ** -0.5, eps)
        return _of_tokens(made), state if kwargs.get("output_final_state", False) else None

    return traced


def channel_rule(itself: Callable) -> Callable:
    """Kimi's: with a decay for each channel of the key."""
    return delta_rule(itself, _decays_of_channels)


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
        given = _in_rows(hidden_states.transpose(1, 2))
        return _of_tokens(short_convolution(given, weight, bias, offsets, activation is not None)).transpose(1, 2)

    return traced


def state_space(itself: Callable) -> Callable:
    """Mamba-2's scan. What is added for each token by itself (D) is no part of the op."""

    def traced(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        offsets = DOCUMENTS.offsets
        if kwargs.get("z") is not None or (offsets is None and kwargs.get("seq_idx") is not None):
            given = dict(D=D, dt_bias=dt_bias, initial_states=initial_states, dt_softplus=dt_softplus)
            given |= dict(dt_limit=dt_limit, return_final_states=return_final_states, **kwargs)
            return itself(hidden_states, dt, A, B, C, chunk_size, **given)
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = torch.clamp(torch.nn.functional.softplus(dt) if dt_softplus else dt, min=dt_limit[0], max=dt_limit[1])
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        initial = None if initial_states is None else initial_states.transpose(2, 3)
        given = (_in_rows(each) for each in (C, B, hidden_states, A.to(wide) * dt.to(wide), dt))
        made, state = ssd_scan(*given, initial, offsets)
        made = _of_tokens(made).to(wide)
        if D is not None:
            made = made + D[..., None] * hidden_states.to(wide)
        return (made, state.transpose(2, 3)) if return_final_states else made

    return traced


def selective_space(itself: Callable) -> Callable:
    """Mamba-1's scan, of [B, D, T]. What is done for each token by itself (D, z) is no part of the op."""

    def traced(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **kwargs: Any,
    ) -> Any:
        dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
        dt = torch.nn.functional.softplus(dt) if delta_softplus else dt
        x, dt, B, C = (_in_rows(each.transpose(1, 2)) for each in (hidden_states, dt, B, C))
        made, state = selective_scan(x, dt, A, B, C, None, DOCUMENTS.offsets)
        made = _of_tokens(made).transpose(1, 2)
        if D is not None:
            made = made + hidden_states * D[None, :, None]
        if z is not None:
            made = made * torch.nn.functional.silu(z)
        return (made, state) if return_last_state else made

    return traced


def no_short_cut(itself: Callable) -> Callable:
    """The kernel for a whole mixer of Mamba's: without it the model's code goes on to its parts.

    (It would read the weights of linears, and so pass by their adapters.)
    """

    def traced(*args: Any, **kwargs: Any) -> None:
        return None

    return traced


def _waves(*shape: int) -> Tensor:
    """Values that repeat nowhere, without a random number."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1, count + 1, dtype=torch.float32, device="cpu").square()).reshape(shape)


def _delta_example() -> tuple[Sequence[Any], dict[str, Any]]:
    decays, rates = -_waves(1, 5, 2).abs(), _waves(1, 5, 2).sigmoid()
    named = dict(g=decays, beta=rates, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True)
    # two chunks; and oneDNN multiplies fp32 in bf16 under a precision of "medium", but no such small chunks
    named["chunk_size"] = 4
    return (_waves(1, 5, 2, 4) + 0.1, _waves(1, 5, 2, 4) - 0.3, _waves(1, 5, 2, 3)), named


def _channel_example() -> tuple[Sequence[Any], dict[str, Any]]:
    args, named = _delta_example()
    return args, {**named, "g": -_waves(1, 5, 2, 4).abs()}


def _convolution_example() -> tuple[Sequence[Any], dict[str, Any]]:
    return (_waves(2, 3, 6), _waves(3, 4), _waves(3)), dict(activation="silu")


def _state_space_example() -> tuple[Sequence[Any], dict[str, Any]]:
    args = _waves(2, 6, 4, 3), _waves(2, 6, 4), -_waves(4).abs(), _waves(2, 6, 2, 5), _waves(2, 6, 2, 5) + 0.2, 4
    more = dict(D=_waves(4), dt_bias=_waves(4) + 0.1, initial_states=_waves(2, 4, 3, 5), dt_softplus=True)
    return args, dict(**more, dt_limit=(0.1, 0.9), return_final_states=True)


def _selective_example() -> tuple[Sequence[Any], dict[str, Any]]:
    args = _waves(2, 3, 6), _waves(2, 3, 6), -_waves(3, 4).abs(), _waves(2, 4, 6), _waves(2, 4, 6) + 0.2
    more = dict(D=_waves(3), z=_waves(2, 3, 6) - 0.1, delta_bias=_waves(3) + 0.1, delta_softplus=True)
    return args, dict(**more, return_last_state=True)


MEANINGS = {  #: by the name of the function in plain PyTorch
    "torch_chunk_gated_delta_rule": Meaning(delta_rule, _delta_example),
    "chunk_kimi_delta_attention": Meaning(channel_rule, _channel_example),
    "causal_conv1d_fn": Meaning(convolution, _convolution_example),
    "mamba2_chunk_scan": Meaning(state_space, _state_space_example),
    "mamba2_split_conv1d_scan_combined": Meaning(no_short_cut, lambda: ((None,) * 6, dict(chunk_size=4))),
    "mamba_selective_scan": Meaning(selective_space, _selective_example),
    "mamba_inner_fn": Meaning(no_short_cut, lambda: ((None,) * 8, {})),
}


@torch.no_grad()
def agrees(written: Callable, meaning: Meaning) -> bool:
    """Whether a function in plain PyTorch gives what its op gives, on one small call, in fp32 whatever the caller's
    autocast."""
    try:
        args, kwargs = meaning.example()
        if "chunk_size" not in inspect.signature(written).parameters:
            kwargs.pop("chunk_size", None)
        with no_autocast():
            expected = torch.utils._pytree.tree_leaves(written(*args, **kwargs))
            made = torch.utils._pytree.tree_leaves(meaning.make(written)(*args, **kwargs))
        return len(expected) == len(made) and all(map(_alike, made, expected))
    except Exception:  # other parameters, say
        return False


def _alike(made: Any, expected: Any) -> bool:
    if not (isinstance(made, Tensor) and isinstance(expected, Tensor)):
        return made is expected
    return (
        made.dtype == expected.dtype
        and made.shape == expected.shape
        and torch.allclose(made, expected, rtol=1e-4, atol=1e-5)
    )
