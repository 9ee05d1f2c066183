"""TRL's fused head: the forward that `add_fused_lm_head` gives a model, run with another function for its scores.

That forward calls the backbone, drops rows without a label, and hands hidden states and the head's weight to one
function, `_ChunkedLogProbFunction`, whose results it puts together. Everything of it is kept but that function: the
code runs over a copy of its module's names, in which ours stands. TRL's module and function stay as they are. Once a
call has shown which rows TRL selects, they are selected here, without its waits for the device (`LabelledRows`).

What the function computes is not believed from its name: ours has to give the same values and gradients for a small
problem, under the options of the call (`same_scores`).

TRL selects rows that have a label by `hidden[mask]` and `labels[mask]`: for the size of both the host waits until the
device is done with the whole backbone, and the device then stands idle. (DPO of an 8B, 4 pairs: 50 of 700 ms on an
H100, in which PEFT switches adapters.) Their number is known from the labels alone, long before.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.cuda import start_copy_to_host, where_set
from tunecompile.notes import Note, note

IGNORED = -100


@dataclass(frozen=True)
class LabelledRows:
    """Of one call of the fused forward."""

    labels: Tensor  #: int64 [N]: of all rows
    count: Tensor  #: how many have one, on its way to the host
    arrived: torch.cuda.Event | None  #: None where it is on the host

    @staticmethod
    def of(kwargs: dict[str, Any]) -> LabelledRows | None:
        """Have the device count them; None where the call has no labels [B, T] of its own."""
        shifted, labels = kwargs.get("shift_labels"), kwargs.get("labels")
        labels = labels[:, 1:] if shifted is None and isinstance(labels, Tensor) and labels.dim() == 2 else shifted
        if type(labels) is not Tensor or labels.dim() != 2:
            return None
        labels = labels.reshape(-1)
        count = (labels != IGNORED).sum()
        return LabelledRows(labels, *(start_copy_to_host(count) if count.is_cuda else (count, None)))

    def places(self) -> Tensor:
        """int64 [M]: the rows that have a label, in order. The host waits for nothing behind the call's beginning."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return where_set(self.labels != IGNORED, int(self.count))

    def selects(self, labels: Tensor) -> bool:
        """Whether these labels, of rows that TRL selected, are those of ours. A wait for the device."""
        return torch.equal(self.labels[self.places()].to(labels.device), labels)


_HOME, _SCORES = "trl.trainer.utils", "_ChunkedLogProbFunction"
_COMPACT = "_use_triton"  #: whether rows without a label are dropped before the function, or after it
_REQUEST = "fused_lm_head"  #: the argument that requests scores
_WRAPPERS = ("accelerate", "torch")  #: packages that wrap a model's forward, and call it unchanged inside
#: the function's parameters, by those of `ScoreCall`
_NAMES = {
    "hidden": "hidden",
    "weight": "weight",
    "bias": "bias",
    "targets": "labels",
    "temperature": "temperature",
    "final_logit_softcapping": "softcap",
    "logit_scale": "logit_scale",
    "outputs": "outputs",
}
_ANY_VALUE = {"chunk_size"}  #: of no matter to the result
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  #: in the function's order


@dataclass(frozen=True)
class ScoreCall:
    """What the function is called with: logits = softcap(logit_scale * (hidden weight^T + bias)) / temperature."""

    hidden: Tensor  #: [T, H]
    weight: Tensor  #: [V, H]
    bias: Tensor | None  #: [V]
    labels: Tensor  #: int64 [T]
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    outputs: tuple[str, ...] = OUTPUTS

    @property
    def options(self) -> tuple:
        """All but the tensors."""
        return self.temperature, self.softcap, self.logit_scale, tuple(self.outputs)


Scores = tuple[Tensor | None, ...]  #: one for each of `OUTPUTS`
Score = Callable[[ScoreCall, Callable[[ScoreCall], Scores]], "Scores | Note | None"]


def fused_head(forward: Any) -> types.FunctionType | None:
    """The function of TRL's fused head in a model's forward, below what wraps it; None where there is none."""
    found = _innermost(forward)
    is_its_own = isinstance(found, types.FunctionType) and found.__globals__.get("__name__") == _HOME
    return found if is_its_own and _REQUEST in inspect.signature(found, follow_wrapped=False).parameters else None


def home_of_forward(forward: Any) -> str:
    """The module that a model's forward was written in, not that of what wraps it."""
    return _home(_innermost(forward))


def home_of_replacement(module: nn.Module) -> str | None:
    """The module that another forward than its class's was written in; None where there is none, but for wrappers."""
    forward = _innermost(vars(module).get("forward", type(module).forward))
    if home_of_forward(forward).startswith("tunecompile."):  # ours, over another one
        forward = _innermost(forward.__wrapped__)
    return None if forward is type(module).forward else home_of_forward(forward)


def requests_scores(kwargs: dict[str, Any]) -> bool:
    """Whether a call of the fused forward is one for scores; others it hands on."""
    return bool(kwargs.get(_REQUEST))


def with_scores(forward: Any, score: Score, told: Callable[[Note], None]) -> Callable | None:
    """A model's forward with `score` in place of TRL's function, and all else as it is; None where its code calls no
    such function.

    Args:
        forward: of which `fused_head` is true.
        score: is given the call and TRL's own function. Where it returns a note or None, TRL's own result is taken.
        told: is given these notes.
    """
    fused = fused_head(forward)
    theirs = fused.__globals__.get(_SCORES) if fused is not None else None
    if theirs is None or not hasattr(theirs, "apply") or _SCORES not in fused.__code__.co_names:
        return None
    stand_in = _StandIn(theirs, score, told)
    names = {**fused.__globals__, _SCORES: stand_in}
    if _COMPACT in fused.__code__.co_names:
        names[_COMPACT] = lambda device: not stand_in.selects
    made = types.FunctionType(fused.__code__, names, fused.__name__, fused.__defaults__, fused.__closure__)
    made.__kwdefaults__ = fused.__kwdefaults__
    made = _put(forward, fused, made)
    return None if made is None else stand_in.around(made, may_select=_COMPACT in fused.__code__.co_names)


class _StandIn:
    """Has the `apply` of TRL's function."""

    def __init__(self, theirs: Any, score: Score, told: Callable[[Note], None]):
        self.theirs, self.score, self.told = theirs, score, told
        self.parameters = list(inspect.signature(theirs.forward).parameters)[1:]
        self.rows: LabelledRows | None = None  #: of the call that runs
        self.known: bool | None = None  #: whether TRL selects these rows; None until a call has shown it

    @property
    def selects(self) -> bool:
        """Whether rows are selected here, and TRL hands over all."""
        return bool(self.known) and self.rows is not None

    def around(self, forward: Callable, may_select: bool) -> Callable:
        """The forward, whose labelled rows are counted as it begins."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.rows = self.rows, LabelledRows.of(kwargs) if may_select and self.known is not False else None
            try:
                return forward(*args, **kwargs)
            finally:
                self.rows = before

        return run

    def apply(self, *args: Any) -> Any:
        call = self._read(args)
        if isinstance(call, Note) or self.rows is None:
            return self._scores(args, call)
        if self.known is None:
            self.known = self.rows.selects(call.labels)
        elif len(call.hidden) == len(self.rows.labels):
            return self._of_labelled(args, call, self.rows)
        return self._scores(args, call)

    def _of_labelled(self, args: tuple, call: ScoreCall, rows: LabelledRows) -> Scores:
        """The scores of labelled rows among zeros."""
        places = rows.places().to(call.hidden.device)
        some = replace(call, hidden=call.hidden.index_select(0, places), labels=call.labels[places])
        made = self._scores(self._with(args, some), some)
        return tuple(x if x is None else x.new_zeros(len(call.hidden)).index_copy(0, places, x) for x in made)

    def _scores(self, args: tuple, call: ScoreCall | Note) -> Any:
        made = call if isinstance(call, Note) else self.score(call, functools.partial(self._as_theirs, args))
        if isinstance(made, Note):
            self.told(made)
        return self.theirs.apply(*args) if made is None or isinstance(made, Note) else made

    def _read(self, args: tuple) -> ScoreCall | Note:
        given = dict(zip(self.parameters, args))
        unknown = [name for name in given if name not in _NAMES and name not in _ANY_VALUE]
        if unknown or not {"hidden", "weight", "targets"} <= given.keys():
            return note("fused-head-parameters", ", ".join(unknown or self.parameters))
        if not set(given.get("outputs", ())) <= set(OUTPUTS):
            return note("fused-head-parameters", ", ".join(given["outputs"]))
        return ScoreCall(**{_NAMES[name]: value for name, value in given.items() if name in _NAMES})

    def _as_theirs(self, args: tuple, call: ScoreCall) -> Scores:
        """TRL's function for another call."""
        return self.theirs.apply(*self._with(args, call))

    def _with(self, args: tuple, call: ScoreCall) -> tuple:
        """The arguments of another call, with those that a call does not name."""
        named = zip(self.parameters, args)
        return tuple(getattr(call, _NAMES[name]) if name in _NAMES else value for name, value in named)


def _home(call: Any) -> str:
    """The module whose names a function's code reads, or that of an object's class."""
    return str(getattr(call, "__globals__", {}).get("__name__") or type(call).__module__)


def _innermost(forward: Any) -> Any:
    """What accelerate and torch wrap, function by function."""
    while True:
        forward = getattr(forward, "__func__", forward)
        inside = getattr(forward, "__wrapped__", None)
        if inside is None or _home(forward).partition(".")[0] not in _WRAPPERS:
            return forward
        forward = inside


def _put(call: Any, old: types.FunctionType, new: types.FunctionType) -> Any:
    """A copy of a call with `new` where `old` is, also inside closures of what wraps it; None where it is nowhere."""
    if call is old:
        return new
    if isinstance(call, types.MethodType):
        inside = _put(call.__func__, old, new)
        return None if inside is None else types.MethodType(inside, call.__self__)
    if isinstance(call, types.FunctionType):
        cells = [_put_in_cell(cell, old, new) for cell in call.__closure__ or ()]
        if all(cell is None for cell in cells):
            return None
        closure = tuple(cell or before for cell, before in zip(cells, call.__closure__ or ()))
        made = types.FunctionType(call.__code__, call.__globals__, call.__name__, call.__defaults__, closure)
        made.__kwdefaults__ = call.__kwdefaults__
        return made
    inside = _put(getattr(call, "model_forward", None), old, new) if hasattr(call, "model_forward") else None
    if inside is None:
        return None
    made = object.__new__(type(call))  # accelerate's object refuses to be copied
    vars(made).update(vars(call), model_forward=inside)
    return made


def _put_in_cell(cell: types.CellType, old: types.FunctionType, new: types.FunctionType) -> types.CellType | None:
    try:
        inside = _put(cell.cell_contents, old, new) if callable(cell.cell_contents) else None
    except ValueError:  # an empty cell
        return None
    return None if inside is None else types.CellType(inside)


def same_scores(ours: Callable[[ScoreCall], Scores], theirs: Callable[[ScoreCall], Scores], like: ScoreCall) -> bool:
    """Whether two functions give the same scores and gradients, on the device and under the options of a call.

    The problem is small, and its numbers are no random ones: a training's random numbers stay as they are.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(like.hidden.device.type, enabled=False):
        given, made = zip(*(_differentiated(function, like) for function in (ours, theirs)))
    if [value is None for value in given[0]] != [value is None for value in given[1]]:
        return False
    pairs = [*zip(*given), *zip(*made)]
    return all(_is_near(a, b) for a, b in pairs if a is not None)


def _differentiated(function: Callable[[ScoreCall], Scores], like: ScoreCall) -> tuple[Scores, tuple]:
    """(the scores of the small problem, gradients of log-probabilities and entropies weighed by row)."""
    device, rows, vocabulary, width = like.hidden.device, 5, 37, 8

    def waves(*shape: int, pace: float) -> Tensor:
        count = torch.Size(shape).numel()
        values = torch.sin(torch.arange(1, count + 1, dtype=torch.float32, device="cpu") * pace).view(shape)
        return values.to(device).requires_grad_()

    hidden, weight = waves(rows, width, pace=0.7), waves(vocabulary, width, pace=1.3)
    bias = None if like.bias is None else waves(vocabulary, pace=2.1)
    labels = (hidden @ weight.t()).argmax(-1)
    labels[::2] = torch.arange(0, vocabulary, 13, device=device)
    found = function(
        ScoreCall(hidden, weight, bias, labels, like.temperature, like.softcap, like.logit_scale, like.outputs)
    )
    factors = torch.arange(1, rows + 1, dtype=torch.float32, device=device)
    total = (found[0] * factors).sum()
    if found[1] is not None:
        total = total + (found[1] * factors.flip(0)).sum()
    trained = [each for each in (hidden, weight, bias) if each is not None]
    return tuple(None if value is None else value.detach() for value in found), torch.autograd.grad(total, trained)


def _is_near(a: Tensor, b: Tensor) -> bool:
    """By more than products in TF32 differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a.double() - b.double()).abs() <= 1e-2 * b.double().abs().max().clamp(min=1e-3)).all())
