"""The kernel that computes `F.scaled_dot_product_attention`: measured once a shape, on this GPU, and cached on disk.

Heads that are too wide for cuDNN and flash have one of ours to choose beside torch's, `BLOCKS`. It is no backend of
torch's: a pass puts it in the place of calls for which it is the fastest.

torch takes the first backend of an order that supports the call. The order is fixed while the graph is traced, so
nothing is paid at run time. cuDNN is 1.7 to 1.9 times faster than flash on Hopper at long sequences; elsewhere it need
not be. Only backends that the user left enabled are considered.

A layer sees a causal call (`is_causal`) or a dense mask. transformers omits the mask where it is causal and nothing
else (no padding, or padding that `runtime/unpad` removed), so a dense mask that reaches a compiled layer is measured as
such: flash refuses it, and the other backends read all of it.
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
from tunecompile._torch.card import AMPERE, capability, older_than
from tunecompile._torch.cuda import attention_order, occupy_gpu
from tunecompile._torch.fake_tensors import size_hint
from tunecompile.compiler import tuning_cache
from tunecompile.compiler.attention_calls import attention_arguments, document_mask_of
from tunecompile.ir.canonicalize import value
from tunecompile.ir.eager_call import by_provider
from tunecompile.ir.op import HALF, has_triton
from tunecompile.ir.pretend_gpu import pretending
from tunecompile.notes import Note, note
from tunecompile.ops import causal_attention
from tunecompile.planner.device_memory import CudaGauge

BLOCKS = "blocks"  #: the op `causal_attention`
WIDEST = 256  #: columns of heads that cuDNN and flash take
DEFAULT = ("cudnn", "flash", "efficient", "math")  #: the order where nothing is measured
SAME = 1.03  #: times within this factor are equal, and the default order decides in place of noise
RUNS = 5  #: timed runs of a backend
SAMPLE = 2 << 30  #: bytes a measurement should take at most

#: free memory that a measurement needs, as a multiple of its inputs: inputs, their gradients, the output, fp32 sums,
#: and shared heads' gradients for each head
HEADROOM = 5


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention, as far as its speed depends on it. Symbolic sizes are at their hints."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    kv_length: int
    head_dim: int
    value_dim: int
    dtype: str
    causal: bool
    mask: tuple[tuple[int, ...], str] | None  #: (shape, dtype)
    dropout: bool

    @property
    def fits_blocks(self) -> bool:
        """Whether `causal_attention` computes it, and torch's faster kernels do not."""
        square = (self.length, self.head_dim) == (self.kv_length, self.value_dim)
        plain = self.causal and self.mask is None and not self.dropout
        return square and plain and self.head_dim > WIDEST and getattr(torch, self.dtype) in HALF and has_triton()

    @property
    def work(self) -> int:
        """Multiplications of both products, as if nothing were masked."""
        return self.batch * self.heads * self.length * self.kv_length * (self.head_dim + self.value_dim)

    @property
    def flops(self) -> int:
        """Floating point operations of forward and backward, seven products, as if nothing were masked."""
        return 7 * self.work

    @property
    def bytes(self) -> int:
        """Bytes of query, key, value, the gradient of the output, and the mask."""
        wide = getattr(torch, self.dtype).itemsize
        query, key = self.batch * self.heads * self.length, self.batch * self.kv_heads * self.kv_length
        mask = torch.Size(self.mask[0]).numel() * getattr(torch, self.mask[1]).itemsize if self.mask else 0
        return (query + key) * (self.head_dim + self.value_dim) * wide + mask

    def sample(self) -> AttentionCall:
        """The call to measure: with fewer heads where all take too much memory. Few heads of long rows fill a GPU."""
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
    """The order in which torch tries its backends, what is faster than these, and where it comes from."""

    order: tuple[str, ...]  #: without `BLOCKS`
    why: Note | None  #: for the report; None where there is no call
    times: tuple[
        tuple[str, float], ...
    ] = ()  #: milliseconds of forward and backward of each timed kernel; fastest first
    rate: float | None = None  #: floating point operations a millisecond of the fastest, as if nothing were masked


def choose(
    gm: GraphModule, device: str, time: Callable[[AttentionCall, str, torch.device], float] | None = None
) -> KernelChoice | None:
    """Choose the kernel order for a graph by its largest call of attention.

    Args:
        gm: Dynamo's graph.
        device: its type, such as "cuda".
        time: measures milliseconds of (call, backend, device); None for `time_on_gpu`.

    Returns:
        The order; None on a device with one kernel only.
    """
    enabled = _enabled(torch.device(device))
    if device != "cuda" or not enabled:
        return None
    found: list[tuple[AttentionCall, torch.device]] = [call for call in map(_call, _nodes(gm)) if call is not None]
    if not found:
        return KernelChoice(enabled, None)
    call, where = max(found, key=lambda pair: pair[0].work)
    if torch.are_deterministic_algorithms_enabled():
        return KernelChoice(enabled, note("attention-in-fixed-order", str(call)))
    first, *others = enabled
    if len(others) < 2:
        return KernelChoice(enabled, note("attention-not-chosen", str(call), first))
    return decide(call, where, enabled, current_flash_attention_impl(), time or time_on_gpu)


@functools.cache
def decide(
    call: AttentionCall,
    device: torch.device,
    enabled: tuple[str, ...],
    flash: str | None,
    time: Callable[[AttentionCall, str, torch.device], float],
) -> KernelChoice:
    """The order for one call, measured at most once a process, even where nothing can be stored.

    flash: the implementation that torch uses for its flash backend; None for its own.
    """
    candidates, whole, call = [name for name in enabled if name != "math"], call, call.sample()
    candidates += [BLOCKS] * (call.fits_blocks and enabled == DEFAULT)
    key = {**tuning_cache.machine(device), "flash": flash, "backends": candidates, **_jsonable(asdict(call))}
    sound = functools.partial(_sound, candidates)
    times, origin = tuning_cache.read("attention", key, sound), "measured before"
    if times is None:
        try:
            times, origin = (
                tuning_cache.keep("attention", key, _measure(call, candidates, device, time), sound),
                "measured",
            )
        except Exception as error:  # only speed is lost
            reason = str(error).strip().partition("\n")[0][:200]
            error.__traceback__ = None  # its frames hold tensors
            gc.collect()
            why = f"{type(error).__name__}: {reason}"
            return KernelChoice(enabled, note("attention-not-measured", str(whole), why, kernel=enabled[0]))
    ranked = rank(times, (*enabled, BLOCKS))
    timed: list[tuple[str, float]] = [(name, times[name]) for name in ranked if name in times]
    found = ", ".join(f"{name} {ms:.2f} ms" for name, ms in timed) or "no fused kernel supports it"
    origin += f" on {call.heads} of them" * (call != whole)
    rate = call.flops / timed[0][1] if timed else None
    why = note("attention-measured", str(whole), found, origin=origin)
    return KernelChoice(tuple(name for name in ranked if name != BLOCKS), why, tuple(timed), rate)


def takes_blocks(node: Node) -> bool:
    """Whether `causal_attention` is the fastest for a call, or nothing can be measured where a GPU is stood in for."""
    found = _call(node)
    if found is None or not found[0].fits_blocks or torch.are_deterministic_algorithms_enabled():
        return False
    call, device = found
    if device.type != "cuda":
        return pretending()
    times = decide(call, device, _enabled(device), current_flash_attention_impl(), time_on_gpu).times
    return bool(times) and times[0][0] == BLOCKS


def rank(times: dict[str, float], default: tuple[str, ...]) -> tuple[str, ...]:
    """Backends by time, the fastest first.

    Those that do not support the call come last, in the default order: another call of the graph may be smaller.
    """
    best = min(times.values(), default=0.0)
    timed = sorted(times, key=lambda name: (times[name] if times[name] > SAME * best else 0.0, default.index(name)))
    return (*timed, *(name for name in default if name not in times))


def _measure(call: AttentionCall, candidates: list[str], device: torch.device, time: Callable) -> dict[str, float]:
    """Milliseconds of forward and backward of each backend that supports the call.

    Raises:
        MemoryError: too little memory is free.
        RuntimeError: a CUDA graph is being recorded.
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
    """Milliseconds of forward and backward on random tensors: the minimum of a few runs.

    The minimum, since other processes on the GPU (ranks that compile, too) make a run longer. The random state,
    autocast and the graph under compilation are left alone.

    Raises:
        RuntimeError: the backend does not support the call.
    """
    with (
        torch.cuda.device(device),
        torch.random.fork_rng([device]),
        torch.enable_grad(),
        outside_compilation(),
        attention_order([name for name in DEFAULT if backend in (name, BLOCKS)]),
    ):
        inputs, grad, mask = _tensors(call, device)
        query, key, value = inputs
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def attend() -> torch.Tensor:
            if backend == BLOCKS:
                return by_provider(causal_attention, query, key, value, call.head_dim**-0.5)[0]
            dropout, shared = 0.1 if call.dropout else 0.0, call.heads != call.kv_heads
            return F.scaled_dot_product_attention(query, key, value, mask, dropout, call.causal, enable_gqa=shared)

        def run() -> float:
            occupy_gpu()  # the launches that follow queue up behind it: kernels are timed, not the host
            begin.record()
            out = attend()
            torch.autograd.grad(out, inputs, grad)
            end.record()
            end.synchronize()
            return begin.elapsed_time(end)

        run()  # kernels are planned, libraries loaded
        first = run()
        return min([first, *(run() for _ in range(RUNS - 1 if first < 20 else 0))])


def _tensors(call: AttentionCall, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """Inputs, output gradient and mask of a call. The layout is that of projections: heads inside tokens."""

    def random(length: int, heads: int, dim: int) -> torch.Tensor:
        made = torch.randn(call.batch, length, heads, dim, device=device, dtype=getattr(torch, call.dtype))
        return made.transpose(1, 2)

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


def notes() -> list[Note]:
    """Hints at a faster kernel that this package does not switch on, since that would change the whole process."""
    if (
        torch.version.cuda
        and importlib.util.find_spec("flash_attn_interface")
        and current_flash_attention_impl() is None
        and capability(torch.device("cuda")) == (9, 0)
    ):
        return [note("flash-attention-3")]
    return []


def _nodes(gm: GraphModule) -> Iterator[Node]:
    """All calls of attention, those in the bodies of checkpoints included; not those that become `varlen_attention`."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            found = [node for node in module.graph.nodes if node.target is F.scaled_dot_product_attention]
            yield from (node for node in found if document_mask_of(attention_arguments(node).mask) is None)


def _call(node: Node) -> tuple[AttentionCall, torch.device] | None:
    """A node's call and its device; None where it is not on 4-D tensors.

    Autocast is not in the graph, so it is read here.
    """
    call = attention_arguments(node).map(value)
    q, k, v = call.query, call.key, call.value
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in (q, k, v)):
        return None
    kind = q.device.type
    mask = call.mask if isinstance(call.mask, torch.Tensor) else None

    def cast(dtype: torch.dtype) -> str:
        eligible = dtype.is_floating_point and dtype != torch.float64 and torch.is_autocast_enabled(kind)
        return str(torch.get_autocast_dtype(kind) if eligible else dtype).removeprefix("torch.")

    def sizes(x: torch.Tensor) -> list[int]:
        return [size_hint(n) for n in x.shape]

    (batch, heads, length, dim), (_, kv_heads, kv_length, _) = sizes(q), sizes(k)
    dropout = call.dropout
    return AttentionCall(
        batch,
        heads,
        kv_heads,
        length,
        kv_length,
        dim,
        sizes(v)[-1],
        cast(q.dtype),
        bool(call.causal),
        None if mask is None else (tuple(sizes(mask)), cast(mask.dtype)),
        bool(dropout) if isinstance(dropout, (int, float)) else dropout is not None,
    ), q.device


def _enabled(device: torch.device) -> tuple[str, ...]:
    """The default order without backends that the GPU does not have, or that the user switched off.

    (By `sdpa_kernel` or `torch.backends.cuda`.)
    """
    flags = {
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
        "flash": torch.backends.cuda.flash_sdp_enabled,
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
        "math": torch.backends.cuda.math_sdp_enabled,
    }
    absent = ("cudnn", "flash") if older_than(device, AMPERE) else ()
    return tuple(name for name in DEFAULT if name not in absent and flags[name]())


def _free_bytes(device: torch.device) -> int:
    on = CudaGauge(device)
    return on.available() - on.allocated()


def _sound(candidates: list[str], times: Any) -> bool:
    """Whether stored times are what `_measure` returns for these candidates."""
    return isinstance(times, dict) and all(
        name in candidates and isinstance(ms, (int, float)) for name, ms in times.items()
    )


def _jsonable(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields as JSON returns them: a key that was read is compared with the one that is looked up."""
    return {**fields, "mask": fields["mask"] and [list(fields["mask"][0]), fields["mask"][1]]}
