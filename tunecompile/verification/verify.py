"""Are the gradients right, on this model and this batch? One step three ways: optimized, eager, and in high precision.

The two others are twins of the model: new modules around the same frozen weights, with trained weights of their own.
Their layers are checkpointed, and the reference's hold their weights in high precision only while they run, so a large
model needs little more than itself. A fresh LoRA has B = 0 and so exact zeros for every gradient of A: trained matrices
that are zero get small random values while a step is verified.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from tunecompile import passes as own_passes
from tunecompile._torch.distributed import around_now, several, sharded
from tunecompile.compiler.plugins import pipeline
from tunecompile.errors import CannotVerify
from tunecompile.ir.op import HALF
from tunecompile.notes import note
from tunecompile.ops.eight_bits import EightBits
from tunecompile.runtime.attach import attach, restore
from tunecompile.runtime.layers.find_layers import find_layers
from tunecompile.runtime.model_state import ATTRIBUTE, Settings, State, is_optimized
from tunecompile.verification.bisect import find, without
from tunecompile.verification.reference_model import format_on, mode, round_products, twin_of
from tunecompile.verification.result import Verification
from tunecompile.verification.tolerance import Verdict, compare_gradients, judge_gradients, judge_loss
from tunecompile.verification.unchanged import unchanged

Step = tuple[float, dict[str, Tensor | None]]  #: loss, and gradients by name
Measure = Callable[[nn.Module, Mapping[str, Any]], Tensor]  #: (model, batch) -> loss, a scalar
WRONG = 2  #: multiple of eager's error from which a gradient is wrong, and the rewrite at fault is looked for
LOSS_IN_8_BITS = 2.0**-6  #: relative error of a loss that counts as none: of one step it is chance
MANY = 32  #: a loss is a mean over tokens, whose roundings cancel out by this factor at least


def verify(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    loss: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = None,
    seed: int = 0,
) -> Verification:
    """Take one step three ways on the same numbers, and compare loss and every gradient.

    The model is left as it was: weights, accumulated gradients, buffers, random state. Dropout is off meanwhile. A
    model that is not optimized is optimized for this step only. Where a gradient of an optimized model is more than
    twice as far off as eager's, the rewrite at fault is found by bisection (a compilation of one layer for each of five
    or six trials) and switched off for this model; training goes on with the other rewrites. Call it under
    `torch.autocast` if the training loop does; fp32 judges half precision, fp64 judges fp32. Each of several ranks may
    verify by itself: nothing is exchanged, and of a `DistributedDataParallel` its module is verified.

    Args:
        model: in training mode, on the device it is trained on.
        batch: the arguments of the model's call, by name; with labels, unless `loss` does without.
        loss: of (model, batch), a scalar; None for `model(**batch).loss`.
        seed: of the random numbers that all three steps draw.

    Returns:
        Losses, errors and verdicts, and the rewrites that were switched off.

    Raises:
        CannotVerify: nothing in the model is trained, it is in evaluation mode, gives no loss or cannot be copied, its
            optimizer steps in the backward pass, its weights are shared with other processes, or
            `DistributedDataParallel(static_graph=True)` is around it.
    """
    model, measure = _check(model), loss or _own_loss
    # Detached, so that the modules that made the batch get no gradients of these steps.
    batch = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), dict(batch))
    optimized = is_optimized(model)
    faults: list[dict[str, Any]] = []
    with unchanged(model, seed) as notes:  # before twins are made, so that they get the same weights, and no dropout
        steps = _run(model, batch, measure, seed)
        rows, verdicts = steps.judge(steps.optimized)
        if steps.eight is not None:
            notes.append(note("judged-in-8-bits", steps.eight.name.upper()))
        if optimized and _is_wrong(rows):

            def right() -> bool:
                return not _is_wrong(steps.judge(_step(model, batch, measure, seed))[0])

            faults = _switch_off(model, right)
    losses = {"optimized": steps.optimized[0], "eager": steps.eager[0], "reference": steps.exact[0]}
    reference = str(steps.reference).removeprefix("torch.")
    return Verification(type(model).__name__, reference, losses, rows, verdicts, steps.untrained, faults, notes)


# ---------------------------------------------------------------- check


def _check(model: nn.Module) -> nn.Module:
    """The module to verify: of a `DistributedDataParallel` its own.

    Raises:
        CannotVerify: a step of it cannot be taken three times.
    """
    if isinstance(model, DistributedDataParallel):
        wrapper, model = model, model.module
    else:
        wrapper = around_now()
    if wrapper is not None and wrapper.static_graph:
        raise CannotVerify(
            reason="DistributedDataParallel(static_graph=True) counts every backward pass as one of its graph's. "
            "Verify before the model is wrapped"
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise CannotVerify(reason="nothing in the model is trained")
    if not model.training:
        raise CannotVerify(reason="the model is in evaluation mode: call model.train()")
    if any(getattr(p, "_post_accumulate_grad_hooks", None) or p._backward_hooks for p in trained):
        raise CannotVerify(
            reason="parameters have hooks that act as soon as they have a gradient, such as an optimizer's step. "
            "Verify before they are added"
        )
    if several() and any(map(sharded, model.parameters())):
        raise CannotVerify(
            reason="its weights are shared with other processes (FSDP, ZeRO-3, tensor parallelism), which would have "
            "to take each of its steps together. Verify on one process, before they are"
        )
    return model


# ---------------------------------------------------------------- run


@dataclass(frozen=True)
class _Steps:
    """One step three ways, and the dtypes that it was computed in."""

    optimized: Step
    eager: Step
    exact: Step
    computed: torch.dtype  #: of the optimized and the eager step
    reference: torch.dtype  #: of the exact step
    eight: EightBits | None  #: what the eager step rounds to, as the optimized one does

    def judge(self, step: Step) -> tuple[list[dict[str, Any]], list[Verdict]]:
        """Compare a step of the optimized model: a row for each parameter, and the verdicts."""
        rows = compare_gradients(self.exact[1], self.eager[1], step[1], self.computed)
        eps = torch.finfo(self.computed).eps / MANY if self.eight is None else LOSS_IN_8_BITS
        return rows, [judge_loss([self.exact[0]], [self.eager[0]], [step[0]], eps), *judge_gradients(rows)]

    @property
    def untrained(self) -> list[str]:
        """Parameters that require a gradient and get none, in eager neither."""
        return [
            name for name, gradient in self.exact[1].items() if gradient is None and self.eager[1].get(name) is None
        ]


def _run(model: nn.Module, batch: Mapping[str, Any], measure: Measure, seed: int) -> _Steps:
    """Take the step optimized, eager and in high precision."""
    with _watching_autocast(model) as autocast:
        optimized = _optimized_step(model, batch, measure, seed)
    kind, computed = next(model.parameters()).device.type, autocast.get("dtype") or _weights_dtype(model)
    wide = computed in (torch.float32, torch.float64) and not any(p.dtype in HALF for p in model.parameters())
    reference = torch.float64 if wide else torch.float32
    state: State | None = getattr(model, ATTRIBUTE, None)
    eight = format_on(state and state.precision, computed, next(model.parameters()).device)

    def rounded(twin: nn.Module) -> nn.Module:
        return twin if eight is None else round_products(twin, eight)

    with torch.autocast(kind, autocast.get("dtype"), enabled="dtype" in autocast):
        eager = _of_a_twin(model, None, lambda twin: _step(rounded(twin), batch, measure, seed))
    exact = _of_a_twin(model, reference, lambda twin: _in_high_precision(twin, batch, measure, seed, reference))
    if all(gradient is None for gradient in exact[1].values()):
        raise CannotVerify(reason="no trained parameter gets a gradient from this loss, in eager PyTorch neither")
    return _Steps(optimized, eager, exact, computed, reference, eight)


def _optimized_step(model: nn.Module, batch: Mapping[str, Any], measure: Measure, seed: int) -> Step:
    """A step of the model itself; one that is not optimized is so for this step."""
    if is_optimized(model):
        return _step(model, batch, measure, seed)
    try:
        return _step(attach(model, Settings(pipeline(own_passes.PIPELINE))), batch, measure, seed)
    finally:
        if is_optimized(model):  # not with TUNECOMPILE=0
            restore(model)


def _own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The loss that the model itself returns.

    Raises:
        CannotVerify: it returns none.
    """
    found = getattr(model(**batch), "loss", None)
    if not isinstance(found, Tensor):
        raise CannotVerify(
            reason="model(**batch) has no loss. Put labels into the batch, or say how to compute it: "
            "verify(model, batch, loss=...)"
        )
    return found


def _step(model: nn.Module, batch: Mapping[str, Any], measure: Measure, seed: int) -> Step:
    """Take a step: the loss, and gradients in host memory."""
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
    """Take a step of the model's twin.

    Some layers cannot be recomputed, since they read state that exists, or has its value, only during the model's call:
    a cache of the caller's, or what an adapter derives from the batch. Then nothing is checkpointed.
    """
    try:
        return take(twin_of(model, dtype))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return take(twin_of(model, dtype, checkpointed=False))


def _in_high_precision(
    twin: nn.Module, batch: Mapping[str, Any], measure: Measure, seed: int, dtype: torch.dtype
) -> Step:
    """Take a step in `dtype`, without autocast."""
    kind = next(twin.parameters()).device.type
    batch = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, dict(batch))
    with torch.autocast(kind, enabled=False), mode(dtype):
        return _step(twin, batch, measure, seed)


@contextlib.contextmanager
def _watching_autocast(model: nn.Module) -> Iterator[dict[str, torch.dtype]]:
    """Yields a dict that gets the dtype of autocast where layers run, under "dtype".

    A trainer's wrapper may enter autocast around the model's forward.
    """
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
    """The dtype of most floating point weights."""
    found: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            found[parameter.dtype] += parameter.numel()
    return found.most_common(1)[0][0]


# ---------------------------------------------------------------- judge


def _is_wrong(rows: list[dict]) -> bool:
    """Whether a gradient is missing, or too far off for chance."""
    return any(not row["has_gradient"] or row["error"] > WRONG * row["yardstick"] for row in rows)


def _switch_off(model: nn.Module, right: Callable[[], bool]) -> list[dict[str, Any]]:
    """Find the rewrites at fault, one after the other, and optimize the model without them.

    Args:
        model: optimized.
        right: takes a step, and tells whether it is right.

    Returns:
        A dict for each fault: `rewrite`, `places` and `said`.
    """
    state: State = getattr(model, ATTRIBUTE)
    faults = [_switch_one_off(state, right)]
    while faults[-1]["rewrite"] is not None and len(faults) < 3 and not right():
        faults.append(_switch_one_off(state, right))
    return faults


def _switch_one_off(state: State, right: Callable[[], bool]) -> dict[str, Any]:
    """Find one rewrite at fault, and switch it off."""
    passes, before = (
        state.passes,
        [each for each in state.notes if each.code == "rewrite-switched-off"],
    )
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
        said = note("fault-beyond-rewrites")
        return {"rewrite": None, "places": [], "said": said}
    lines = sorted(
        place for place in places if unit.rewrite is not None and place.partition(" at ")[0] == unit.rewrite.name
    )
    said = note("rewrite-switched-off", unit.name, f" ({'; '.join(lines)})" if lines else "")
    state.reattach(without(passes, unit), *before, said)
    return {"rewrite": unit.name, "places": lines, "said": said}
