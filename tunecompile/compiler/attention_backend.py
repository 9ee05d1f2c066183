"""Which kernel computes `F.scaled_dot_product_attention`: measured once a shape, on this GPU, and kept (`measured.py`).

torch takes the first backend of an order that supports the call, and the order is baked in while the graph is traced, so nothing is
paid at run time. cuDNN is 1.7 to 1.9 times faster than flash on Hopper at long sequences; elsewhere it need not be. Only those that the
user left enabled are considered.

A layer sees a causal call (`is_causal`) or a dense mask. transformers leaves the mask out where it is causal and nothing else (no padding, or
padding that `padding.py` took out), so a dense mask that reaches a compiled layer is measured as what it is: flash refuses it,
the others read all of it.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.nn.attention import current_flash_attention_impl

from tunecompile._torch.autograd import outside_compilation
from tunecompile._torch.cuda import attention_order, occupy_gpu
from tunecompile._torch.fake_tensors import size_hint
from tunecompile.compiler import tuning_cache
from tunecompile.planner.device_memory import CudaGauge

DEFAULT = ("cudnn", "flash", "efficient", "math")  #: the order where nothing is measured
SAME = 1.03  #: times within this factor are equal, and the default order decides: noise must not
RUNS = 5
SAMPLE = 2 << 30  #: bytes a measurement should take at most
HEADROOM = 5  #: so many times the inputs must be free: they, their gradients, the output, sums in fp32, and shared heads' gradients for each head


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention, as far as its speed depends on it. Sizes that are symbols stand at their hint."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    kv_length: int
    head_dim: int
    value_dim: int
    dtype: str
    causal: bool
    mask: tuple | None  #: (shape, dtype)
    dropout: bool

    @property
    def work(self) -> int:
        return self.batch * self.heads * self.length * self.kv_length * (self.head_dim + self.value_dim)

    @property
    def flops(self) -> int:
        """Of forward and backward, seven products in all, as if nothing were masked."""
        return 7 * self.work

    @property
    def bytes(self) -> int:
        """Of query, key, value, the gradient of the output, and the mask."""
        wide = getattr(torch, self.dtype).itemsize
        query, key = self.batch * self.heads * self.length, self.batch * self.kv_heads * self.kv_length
        mask = torch.Size(self.mask[0]).numel() * getattr(torch, self.mask[1]).itemsize if self.mask else 0
        return (query + key) * (self.head_dim + self.value_dim) * wide + mask

    def sample(self) -> AttentionCall:
        """The same on fewer heads, where all of them take too much memory: heads know nothing of each other, and few of long rows fill a GPU."""
        shares = [
            n
            for n in range(1, self.kv_heads + 1)
            if self.kv_heads % n == 0 and self.heads % n == 0 and self.mask is None
        ]
        calls = [replace(self, heads=self.heads // n, kv_heads=self.kv_heads // n) for n in shares]
        return next((call for call in calls if HEADROOM * call.bytes <= SAMPLE), calls[-1] if calls else self)

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        length = f"{self.length}" if self.length == self.kv_length else f"{self.length}/{self.kv_length}"
        kind = ["causal"] * self.causal + ["dense mask"] * (self.mask is not None) + ["dropout"] * self.dropout
        return ", ".join([f"{self.batch}x{heads}x{length}x{self.head_dim} {self.dtype}", *kind])


@dataclass(frozen=True)
class KernelChoice:
    """The order in which torch tries its backends, and where it comes from."""

    order: tuple[str, ...]
    why: str
    times: tuple[
        tuple[str, float], ...
    ] = ()  #: milliseconds, forward and backward, of those that were timed; the fastest first
    rate: float | None = None  #: floating point operations a millisecond of the fastest, as if nothing were masked


def choose(
    gm: GraphModule, device: str, time: Callable[[AttentionCall, str, torch.device], float] | None = None
) -> KernelChoice | None:
    """For the graph's largest call of attention; None on a device with one kernel only."""
    enabled = _enabled()
    if device != "cuda" or not enabled:
        return None
    found = [call for node in _nodes(gm) if (call := _call(node)) is not None]
    if not found:
        return KernelChoice(enabled, "")
    call, where = max(found, key=lambda pair: pair[0].work)
    if torch.are_deterministic_algorithms_enabled():
        return KernelChoice(enabled, f"in fixed order, since deterministic algorithms were asked for ({call})")
    if len(enabled) < 3:
        return KernelChoice(enabled, f"{enabled[0]}, others are switched off ({call})")
    return decide(call, where, enabled, current_flash_attention_impl(), time or time_on_gpu)


@functools.cache
def decide(
    call: AttentionCall,
    device: torch.device,
    enabled: tuple[str, ...],
    flash: str | None,
    time: Callable[[AttentionCall, str, torch.device], float],
) -> KernelChoice:
    """Measured at most once a call and process, also where nothing can be stored. `flash`: whose implementation stands for it."""
    candidates, whole, call = [name for name in enabled if name != "math"], call, call.sample()
    key = {**tuning_cache.machine(device), "flash": flash, "backends": candidates, **_jsonable(asdict(call))}
    sound = functools.partial(_sound, candidates)
    times, origin = tuning_cache.read("attention", key, sound), "measured before"
    if times is None:
        try:
            times, origin = (
                tuning_cache.keep("attention", key, _measure(call, candidates, device, time), sound),
                "measured",
            )
        except Exception as error:  # speed is all that is lost
            reason = str(error).strip().partition("\n")[0][:200]
            error.__traceback__ = None  # whose frames hold tensors
            gc.collect()
            return KernelChoice(
                enabled, f"{enabled[0]} first, not measured: {type(error).__name__}: {reason} ({whole})"
            )
    ranked = rank(times, enabled)
    said = (
        ", ".join(f"{name} {times[name]:.2f} ms" for name in ranked if name in times) or "no fused kernel supports it"
    )
    origin += f" on {call.heads} of them" * (call != whole)
    timed = tuple((name, times[name]) for name in ranked if name in times)
    return KernelChoice(ranked, f"{said} ({whole}, {origin})", timed, call.flops / timed[0][1] if timed else None)


def rank(times: dict[str, float], default: tuple[str, ...]) -> tuple[str, ...]:
    """The fastest first; those that do not support the call come last, in the default order: another call of the graph may be smaller."""
    best = min(times.values(), default=0.0)
    timed = sorted(times, key=lambda name: (times[name] if times[name] > SAME * best else 0.0, default.index(name)))
    return (*timed, *(name for name in default if name not in times))


def _measure(call: AttentionCall, candidates: list[str], device: torch.device, time: Callable) -> dict[str, float]:
    """Milliseconds, forward and backward, of each backend that supports the call.

    Raises:
        MemoryError: too little is free to try.
        RuntimeError: not now.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being recorded")
    free = _free_bytes(device)
    if free < HEADROOM * call.bytes:
        raise MemoryError(f"{free / 2**20:,.0f} MiB are free, {HEADROOM * call.bytes / 2**20:,.0f} are needed")
    times = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch explains why a backend does not support a call
        for name in candidates:
            try:
                times[name] = time(call, name, device)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as unsupported:
                unsupported.__traceback__ = None  # its frames hold tensors, and some of them the error
    return times


def time_on_gpu(call: AttentionCall, backend: str, device: torch.device) -> float:
    """Milliseconds of forward and backward on random tensors, the least of a few: other processes on the GPU, ranks that compile too, make a run longer.
    Random state, autocast and graph under compilation see nothing of it.

    Raises:
        RuntimeError: the backend does not support the call.
    """
    with (
        torch.cuda.device(device),
        torch.random.fork_rng([device]),
        torch.enable_grad(),
        outside_compilation(),
        attention_order([backend]),
    ):
        inputs, grad, mask = _tensors(call, device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def run() -> float:
            occupy_gpu()  # the launches that follow queue up behind it: kernels are timed, not the host
            begin.record()
            out = F.scaled_dot_product_attention(
                *inputs, mask, 0.1 if call.dropout else 0.0, call.causal, enable_gqa=call.heads != call.kv_heads
            )
            torch.autograd.grad(out, inputs, grad)
            end.record()
            end.synchronize()
            return begin.elapsed_time(end)

        run()  # plans are made, libraries loaded
        first = run()
        return min([first, *(run() for _ in range(RUNS - 1 if first < 20 else 0))])


def _tensors(call: AttentionCall, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """Laid out as projections leave them: heads inside tokens."""

    def random(length: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(call.batch, length, heads, dim, device=device, dtype=getattr(torch, call.dtype)).transpose(
            1, 2
        )

    inputs = [
        random(call.length, call.heads, call.head_dim),
        random(call.kv_length, call.kv_heads, call.head_dim),
        random(call.kv_length, call.kv_heads, call.value_dim),
    ]
    mask = None
    if call.mask:
        shape, dtype = call.mask
        mask = torch.ones(shape, device=device, dtype=torch.bool).tril()
        mask = (
            mask
            if dtype == "bool"
            else torch.zeros(shape, device=device, dtype=getattr(torch, dtype)).masked_fill(~mask, -1e4)
        )
    return [x.requires_grad_() for x in inputs], random(call.length, call.heads, call.value_dim), mask


def notes() -> list[str]:
    """What could be faster and is not ours to switch on, since it would change the whole process."""
    if (
        torch.version.cuda
        and importlib.util.find_spec("flash_attn_interface")
        and current_flash_attention_impl() is None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() == (9, 0)
    ):
        return [
            "FlashAttention 3 is installed: after torch.nn.attention.activate_flash_attention_impl('FA3') it is measured in place of flash"
        ]
    return []


def _nodes(gm: GraphModule) -> Iterator[Node]:
    """All calls, those in the bodies of checkpoints too."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            yield from (node for node in module.graph.nodes if node.target is F.scaled_dot_product_attention)


def _call(node: Node) -> tuple[AttentionCall, torch.device] | None:
    """What a node computes, and where. Autocast is not in the graph, so it is asked for."""
    given = {**dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args)), **node.kwargs}
    values = {
        name: value.meta.get("example_value") if isinstance(value, Node) else value for name, value in given.items()
    }
    q, k, v, mask = (values.get(name) for name in ("query", "key", "value", "attn_mask"))
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in (q, k, v)):
        return None

    def cast(dtype: torch.dtype) -> str:
        kind = q.device.type
        eligible = dtype.is_floating_point and dtype != torch.float64 and torch.is_autocast_enabled(kind)
        return str(torch.get_autocast_dtype(kind) if eligible else dtype).removeprefix("torch.")

    def sizes(x: torch.Tensor) -> list[int]:
        return [size_hint(n) for n in x.shape]

    (batch, heads, length, dim), (_, kv_heads, kv_length, _) = sizes(q), sizes(k)
    dropout = values.get("dropout_p")
    return AttentionCall(
        batch,
        heads,
        kv_heads,
        length,
        kv_length,
        dim,
        sizes(v)[-1],
        cast(q.dtype),
        bool(values.get("is_causal", False)),
        (tuple(sizes(mask)), cast(mask.dtype)) if isinstance(mask, torch.Tensor) else None,
        bool(dropout) if isinstance(dropout, (int, float)) else dropout is not None,
    ), q.device


def _enabled() -> tuple[str, ...]:
    """The default order without what the user has switched off (`torch.nn.attention.sdpa_kernel` or torch.backends.cuda)."""
    flags = {
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
        "flash": torch.backends.cuda.flash_sdp_enabled,
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
        "math": torch.backends.cuda.math_sdp_enabled,
    }
    return tuple(name for name in DEFAULT if flags[name]())


def _free_bytes(device: torch.device) -> int:
    on = CudaGauge(device)
    return on.available() - on.allocated()


def _sound(candidates: list[str], times: Any) -> bool:
    return isinstance(times, dict) and all(
        name in candidates and isinstance(ms, (int, float)) for name, ms in times.items()
    )


def _jsonable(fields: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: a key that was read is compared with the one asked for."""
    return {**fields, "mask": fields["mask"] and [list(fields["mask"][0]), fields["mask"][1]]}
