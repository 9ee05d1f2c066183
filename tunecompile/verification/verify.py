"""Are the gradients right, on this model and this batch? One step three ways: optimized, eager, and in high precision.

The two others are twins of the model: new modules around the same frozen weights, with trained weights of their own. Their layers are
checkpointed, and the reference's hold their weights in high precision only while they run, so a large model needs little more than itself.
A fresh LoRA has B = 0 and so exact zeros for every gradient of A: what is trained and zero is small and random while a step is verified.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from tunecompile import passes as own_passes
from tunecompile._torch.distributed import around_now, several
from tunecompile.compiler.plugins import pipeline
from tunecompile.errors import CannotVerify
from tunecompile.ir.op import HALF
from tunecompile.runtime.attach import attach, restore
from tunecompile.runtime.find_layers import find_layers
from tunecompile.runtime.memory.oom_recovery import sharded
from tunecompile.runtime.model_state import ATTRIBUTE, Settings, State, is_optimized
from tunecompile.verification.bisect import find, without
from tunecompile.verification.reference_model import mode, twin_of
from tunecompile.verification.tolerance import Verdict, compare_gradients, judge_gradients, judge_loss

__all__ = ["WRONG", "Verification", "verify"]

Step = tuple[float, dict[str, Tensor | None]]  #: loss, and gradients by name
WRONG = 2  #: times eager's error: from here on a gradient is wrong and not unlucky, and a rewrite is looked for that makes it so
MANY = 32  #: one loss is a mean over tokens whose roundings cancel out: by how much at least
SMALL = 0.01  #: standard deviation of what stands for zeros


@dataclass(frozen=True)
class Verification:
    """One step, optimized, eager and in high precision. Printable; `to_dict()` for machines.

    A row of `gradients` has `parameter`, its name; `error` and `eager_error`, relative distances to the reference's gradient,
    ‖g - r‖ / max(‖r‖, floor), with the dtype's eps times the largest gradient as floor; `yardstick`, eager's error, and at least what rounding makes
    of it; `norm_ratio`, ‖g‖ / ‖r‖; and `has_gradient`, whether there is one that is not zero, or eager has none either.
    """

    model: str  #: its class
    reference: str  #: its dtype: "float32" or "float64"
    losses: dict[str, float]  #: of "optimized", "eager" and "reference"
    gradients: list[dict[str, Any]]  #: a row for each trained parameter
    verdicts: list[Verdict]  #: on the loss and on all gradients
    untrained: list[str] = field(
        default_factory=list
    )  #: parameters that are to be trained and get no gradient, in eager neither: a mistake, perhaps
    faults: list[dict[str, Any]] = field(
        default_factory=list
    )  #: `rewrite`s that make a step wrong, and their `places`: they are switched off
    notes: list[str] = field(default_factory=list)  #: what was done to the model meanwhile

    @property
    def passed(self) -> bool:
        """Whether all verdicts hold."""
        return all(verdict.passed for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name, ready for JSON, and `passed`."""
        return asdict(self) | {"passed": self.passed}

    def summary(self) -> str:
        """In a line."""
        broken = "; ".join(
            f"{verdict.name} does not hold ({verdict.detail})" for verdict in self.verdicts if not verdict.passed
        )
        return (
            "; ".join([broken, *(fault["said"] for fault in self.faults)])
            if broken
            else f"{len(self.gradients)} gradients are as near to {self.reference} as eager's"
        )

    def __str__(self) -> str:
        lines = [
            f"tunecompile: one step of {self.model}, against {self.reference}: {'passed' if self.passed else 'FAILED'}",
            "  loss: " + ", ".join(f"{name} {loss:.7g}" for name, loss in self.losses.items()),
            *_table(self.gradients),
        ]
        lines += [f"  {'passed' if v.passed else 'FAILED'}: {v.name} ({v.detail})" for v in self.verdicts]
        lines += [f"  {fault['said']}" for fault in self.faults]
        if self.untrained:
            more = f" and {len(self.untrained) - 3} more" if len(self.untrained) > 3 else ""
            lines.append(f"  without a gradient, in eager too: {', '.join(self.untrained[:3])}{more}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def verify(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    loss: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = None,
    seed: int = 0,
) -> Verification:
    """Take one step three ways on the same numbers, and compare loss and every gradient.

    The model is left as it was: weights, gradients that have accumulated, buffers, random state. Dropout is off meanwhile. A model that is not
    optimized is, for this step. Where a gradient of an optimized model is more than twice as far off as eager's, the rewrite at fault is found by
    bisection (a compilation of one layer for each of five or six trials) and switched off for this model; training goes on with what is left.
    Call it under `torch.autocast` if the training loop does; fp32 judges half precision, fp64 judges fp32. Of several ranks each may verify by itself:
    nothing is exchanged, and of a `DistributedDataParallel` its module is verified.

    Args:
        model: in training mode, on the device it is trained on.
        batch: what the model is called with, by name; with labels, unless `loss` says otherwise.
        loss: of (model, batch), a scalar; None for `model(**batch).loss`.
        seed: of the random numbers that all three draw.

    Returns:
        Losses, errors and verdicts, and what was switched off.

    Raises:
        CannotVerify: nothing in the model is trained, it is in evaluation mode, gives no loss or cannot be copied, its optimizer steps in the
            backward pass, its weights are shared with other processes, or `DistributedDataParallel(static_graph=True)` is around it.
    """
    measure = loss or _own_loss
    wrapper = model if isinstance(model, DistributedDataParallel) else around_now()
    if wrapper is not None and wrapper.static_graph:
        raise CannotVerify(
            reason="DistributedDataParallel(static_graph=True) counts every backward pass as one of its graph's. Verify before the model is wrapped"
        )
    model = wrapper.module if wrapper is model else model
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained or not model.training:
        raise CannotVerify(
            reason="the model is in evaluation mode: call model.train()"
            if trained
            else "nothing in the model is trained"
        )
    if any(getattr(p, "_post_accumulate_grad_hooks", None) or p._backward_hooks for p in trained):
        raise CannotVerify(
            reason="parameters have hooks that act as soon as they have a gradient, such as an optimizer's step. Verify before they are added"
        )
    if several() and any(map(sharded, model.parameters())):
        raise CannotVerify(
            reason="its weights are shared with other processes (FSDP, ZeRO-3, tensor parallelism), which would have to take each of its steps "
            "together. Verify on one process, before they are"
        )
    batch = tree_map_only(
        Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), dict(batch)
    )  # its makers see no gradient of this
    visiting = not is_optimized(model)
    faults: list[dict[str, Any]] = []
    with _unchanged(
        model, seed
    ) as notes:  # before twins are made, which then have the same weights and no dropout either
        try:
            with _watching_autocast(model) as autocast:
                ours = _step(attach(model, Settings(pipeline(own_passes.PIPELINE))) if visiting else model, batch, measure, seed)
        finally:
            if visiting and is_optimized(model):  # TUNECOMPILE=0
                restore(model)
        kind, computed = next(model.parameters()).device.type, autocast.get("dtype") or _weights_dtype(model)
        dtype = torch.float64 if computed in (torch.float32, torch.float64) and not _is_half(model) else torch.float32
        with torch.autocast(kind, autocast.get("dtype"), enabled="dtype" in autocast):
            eager = _of_a_twin(model, None, lambda twin: _step(twin, batch, measure, seed))
        exact = _of_a_twin(model, dtype, lambda twin: _in_high_precision(twin, batch, measure, seed, dtype))

        def judge(step: Step) -> tuple[list[dict], list[Verdict]]:
            rows = compare_gradients(exact[1], eager[1], step[1], computed)
            near = judge_loss([exact[0]], [eager[0]], [step[0]], torch.finfo(computed).eps / MANY)
            return rows, [near, *judge_gradients(rows)]

        rows, verdicts = judge(ours)

        def right() -> bool:
            return not _is_wrong(judge(_step(model, batch, measure, seed))[0])

        if not visiting and _is_wrong(rows):
            faults = _switch_off(model, right, notes)
    losses = {"optimized": ours[0], "eager": eager[0], "reference": exact[0]}
    untrained = [name for name, gradient in exact[1].items() if gradient is None and eager[1].get(name) is None]
    return Verification(
        type(model).__name__, str(dtype).removeprefix("torch."), losses, rows, verdicts, untrained, faults, notes
    )


def _is_wrong(rows: list[dict]) -> bool:
    return any(not row["has_gradient"] or row["error"] > WRONG * row["yardstick"] for row in rows)


def _switch_off(model: nn.Module, right: Callable[[], bool], notes: list[str]) -> list[dict[str, Any]]:
    """Find the rewrites at fault, one after the other, and optimize the model without them. right: whether a step now is."""
    state: State = getattr(model, ATTRIBUTE)
    if state.precision is not None:
        notes.append(f"in {state.precision} gradients are off by some per cent: nothing is switched off for it")
        return []
    faults = [_switch_one_off(state, right)]
    while faults[-1]["rewrite"] is not None and len(faults) < 3 and not right():
        faults.append(_switch_one_off(state, right))
    return faults


def _switch_one_off(state: State, right: Callable[[], bool]) -> dict[str, Any]:
    passes, before = state.passes, [note for note in state.notes if "switched off" in note]
    places = {place for tally in state.matches() for place in tally.places}

    def wrong(pipeline: tuple) -> bool:
        state.reattach(pipeline)
        return not right()

    try:
        unit = find(passes, wrong)
    except BaseException:
        state.reattach(passes, *before)
        raise
    if unit is None:
        state.reattach(passes, *before)
        said = "it is wrong without any rewrite, too: the fault is in generated code, or in head and loss. tunecompile.restore(model) leaves both out"
        return {"rewrite": None, "places": [], "said": said}
    lines = sorted(
        place for place in places if unit.rewrite is not None and place.partition(" at ")[0] == unit.rewrite.name
    )
    said = (
        f"the rewrite at fault is {unit.name}"
        + (f" ({'; '.join(lines)})" if lines else "")
        + ": it is switched off for this model"
    )
    state.reattach(without(passes, unit), *before, said)
    return {"rewrite": unit.name, "places": lines, "said": said}


# ---------------------------------------------------------------- the judgement


def _table(rows: list[dict]) -> list[str]:
    """The worst parameters first."""
    worst = sorted(rows, key=lambda row: -row["error"] / row["yardstick"])[:SHOWN]
    width = max((len(row["parameter"]) for row in worst), default=0)
    lines = [f"  {'parameter':{width}}     error   eager's  of eager's  norm ratio"]
    for row in worst:
        ratio = f"{row['norm_ratio']:12.4f}" if row["has_gradient"] else " no gradient"
        lines.append(
            f"  {row['parameter']:{width}}  {row['error']:8.2e}  {row['eager_error']:8.2e}  {row['error'] / row['yardstick']:10.2f}{ratio}"
        )
    return lines + (
        [f"  and {len(rows) - SHOWN} parameters that are nearer to the reference"] if len(rows) > SHOWN else []
    )


SHOWN = 12  #: rows of a printed table


# ---------------------------------------------------------------- the three steps


def _own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    found = getattr(model(**batch), "loss", None)
    if not isinstance(found, Tensor):
        raise CannotVerify(
            reason="model(**batch) has no loss. Put labels into the batch, or say how to compute it: verify(model, batch, loss=...)"
        )
    return found


def _step(model: nn.Module, batch: Mapping[str, Any], measure: Callable, seed: int) -> Step:
    """Loss, and gradients in host memory."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = measure(model, batch)
    loss.backward()
    gradients = {
        name: None if p.grad is None else p.grad.detach().cpu()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return float(loss.detach().double()), gradients


def _of_a_twin(model: nn.Module, dtype: torch.dtype | None, take: Callable[[nn.Module], Step]) -> Step:
    """A step of the model's twin. A layer that reads what is only there, or is another, while the model is called (a cache of the caller's, what an adapter
    finds out about the batch) cannot be computed again: then all is kept."""
    try:
        return take(twin_of(model, dtype))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return take(twin_of(model, dtype, checkpointed=False))


def _in_high_precision(
    twin: nn.Module, batch: Mapping[str, Any], measure: Callable, seed: int, dtype: torch.dtype
) -> Step:
    kind = next(twin.parameters()).device.type
    batch = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, dict(batch))
    with torch.autocast(kind, enabled=False), mode(dtype):
        return _step(twin, batch, measure, seed)


@contextlib.contextmanager
def _watching_autocast(model: nn.Module) -> Iterator[dict[str, torch.dtype]]:
    """Under which dtype layers run, where a trainer's wrapper enters autocast around the model's forward, or anybody does."""
    seen: dict[str, torch.dtype] = {}
    kind = next(model.parameters()).device.type

    def look(*_: Any) -> None:
        if torch.is_autocast_enabled(kind):
            seen["dtype"] = torch.get_autocast_dtype(kind)

    inner = next((stack.owner for stack in find_layers(model)), model)
    handle = inner.register_forward_pre_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


def _weights_dtype(model: nn.Module) -> torch.dtype:
    """Of most floating point weights."""
    found: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            found[parameter.dtype] += parameter.numel()
    return found.most_common(1)[0][0]


def _is_half(model: nn.Module) -> bool:
    return any(p.dtype in HALF for p in model.parameters())


# ---------------------------------------------------------------- what is put back


@contextlib.contextmanager
def _unchanged(model: nn.Module, seed: int) -> Iterator[list[str]]:
    """The model as it is verified, and as it was, afterwards. Yields what to say of it."""
    notes: list[str] = []
    gradients = {p: p.grad for p in model.parameters() if p.grad is not None}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with contextlib.ExitStack() as stack:
        stack.callback(_forget, model)
        device = next(model.parameters()).device
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        for put_back in (_fill_zeros(model, seed, notes), _without_dropout(model, notes)):
            stack.callback(put_back)
        try:
            yield notes
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers and not torch.equal(buffer, buffers[name]):
                        buffer.copy_(buffers[name])
            for parameter in model.parameters():
                parameter.grad = gradients.get(parameter)


def _forget(model: nn.Module) -> None:
    """Twins, which know themselves, and what a memory budget would learn from them."""
    gc.collect()
    state: State | None = getattr(model, ATTRIBUTE, None)
    for budget in state.step.budgets if state is not None else ():
        budget.forget_step()


@torch.no_grad()
def _fill_zeros(model: nn.Module, seed: int, notes: list[str]) -> Callable[[], None]:
    """Trained matrices that are zero, such as a fresh LoRA's B, get small random values."""
    zero = [p for p in model.parameters() if p.requires_grad and p.dim() > 1 and not p.any()]
    for number, parameter in enumerate(zero):
        generator = torch.Generator().manual_seed(seed + number)
        parameter.copy_(torch.empty(parameter.shape).normal_(0, SMALL, generator=generator))
    if zero:
        notes.append(f"{len(zero)} trained matrices are zero: they were small and random for this step")

    @torch.no_grad()
    def put_back() -> None:
        for parameter in zero:
            parameter.zero_()

    return put_back


def _without_dropout(model: nn.Module, notes: list[str]) -> Callable[[], None]:
    """Masks differ by design: probabilities are zero, in modules and in what transformers' attention reads."""
    found = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
        and value > 0
        and ("dropout" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd)))
    ]
    for module, name, _ in found:
        setattr(module, name, 0.0)
    if found:
        notes.append(f"dropout was off, in {len(found)} places")

    def put_back() -> None:
        for module, name, value in found:
            setattr(module, name, value)

    return put_back
