"""Faults planted into the ops' own source, and what is compared to find them: the op, the pass that makes it, and a model's training step."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import tunecompile
import tunecompile.passes
from tests.support import zoo
from tests.support.batches import branches, padded
from tests.support.passes.run import assert_same, check, family, random, results
from tests.support.planted_experts import EXPERT_CASES
from tests.support.planted_functions import (
    SEED,
    adapted,
    attention,
    by_bitsandbytes,
    by_factors,
    by_lora,
    dequantised,
    gemma_norm,
    head,
    layer_norm,
    modulated_norm,
    norm,
    one_query,
    quantised,
    residual_layer_norm,
    residual_modulated_norm,
    residual_norm,
    rotated,
    rotated_in_pairs,
)
from tests.support.planted_recurrent import RECURRENT_CASES
from tests.support.trees import dense, tree_of
from tunecompile.ir.op import OPS, Op

op_module = importlib.import_module("tunecompile.ir.op")  # the package shows the function of that name
FOLDER = Path(op_module.__file__).parents[1] / "ops"
RECOGNIZE = "tunecompile.passes.recognize"
#: op's file -> the one that has the most of what it computes, where faults may be, too
CHUNKS = "recurrent/delta_chunks"
BESIDE = dict.fromkeys(("recurrent/gated_delta_rule", "recurrent/channel_delta_rule", "recurrent/ssd_scan"), CHUNKS)
BESIDE["attention/dropout"] = "attention/documents"
BESIDE |= dict.fromkeys(("norms/rms_norm", "norms/layer_norm", "norms/modulated_norm"), "norms/of_sum")
_numbers = itertools.count()


@dataclass(frozen=True)
class Fault:
    """One change of an op's source. `old` stands there exactly once. of: which of the `SUBJECTS` shows it."""

    of: str
    what: str
    old: str
    new: str


@dataclass(frozen=True)
class Subject:
    """An op, what it stands for, and where it is made.

    spelled, call: the same function of `args(dtype)` in plain torch, and by the op, which is its first argument.   passes: that make it of `spelled`; empty
    where no pass does.   places: (module, name) by which they know it.   model: that holds it, and a batch, or None where no small model does.
    meaning: in place of `spelled`, where that has no fp64.   dtype: in which the pass sees it.
    """

    file: str
    op: str
    spelled: Callable
    call: Callable
    args: Callable[[torch.dtype], list[Any]]
    places: tuple[tuple[str, str], ...]
    passes: tuple[str, ...] = ()
    model: Callable[[], tuple[torch.nn.Module, dict]] | None = None
    meaning: Callable | None = None
    dtype: torch.dtype = torch.float32


def plant(monkeypatch, subject: Subject, old: str = "", new: str = "") -> Op:
    """The subject's op made anew from changed source, under another name, where passes and models find it. Without a change: the same op again."""
    source, beside = (FOLDER / f"{subject.file}.py").read_text(), BESIDE.get(subject.file)
    inner = (FOLDER / f"{beside}.py").read_text() if beside else ""
    assert not old or source.count(old) + inner.count(old) == 1, (
        f"{old!r} stands {source.count(old)} times in {subject.file}.py: the table of faults is older than the op"
    )
    suffix, register, before = f"_planted{next(_numbers)}", op_module.op, set(OPS)

    def renamed(*args: Any, **kwargs: Any) -> Callable:
        def under_another_name(function: Callable) -> Any:
            function.__name__ += suffix
            return register(*args, **kwargs)(function)

        return under_another_name

    module = types.ModuleType(f"planted{suffix}")
    with monkeypatch.context() as inside:
        inside.setattr(op_module, "op", renamed)
        inside.setitem(sys.modules, module.__name__, module)
        if old and old in inner:
            changed = types.ModuleType(f"tunecompile.ops.{beside.replace('/', '.')}")
            inside.setitem(sys.modules, changed.__name__, changed)
            exec(compile(inner.replace(old, new), f"{beside}.py", "exec"), vars(changed))
        exec(compile(source.replace(old, new) if old else source, f"{subject.file}.py", "exec"), vars(module))
    for made in set(OPS) - before:  # what they are is asked for until the test ends
        monkeypatch.setitem(OPS, made, OPS.pop(made))
    planted = getattr(module, subject.op)
    planted.providers.clear()  # they would run in place of what is changed
    for place, name in subject.places:
        monkeypatch.setattr(importlib.import_module(place), name, planted)
    return planted


# ---------------------------------------------------------------- the three nets


def op_holds(op: Op, subject: Subject) -> bool:
    """Whether its gradients are those of its own values, and both are the plain function's, in fp64."""
    args = subject.args(torch.float64)
    trained = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.requires_grad]

    def of(*leaves: torch.Tensor) -> Any:
        given = list(args)
        for i, leaf in zip(trained, leaves):
            given[i] = leaf
        return subject.call(op, *given)

    got, expected = (
        results(lambda *given: subject.call(op, *given), args),
        results(subject.meaning or subject.spelled, args),
    )
    try:
        assert_same(got[0] + got[1], expected[0] + expected[1], 1e-9)
    except AssertionError:
        return False
    return not trained or torch.autograd.gradcheck(
        of, [args[i].detach().clone().requires_grad_() for i in trained], raise_exception=False
    )


def pass_holds(subject: Subject) -> bool:
    """Whether the rewritten graph gives what the plain function does. It has to be rewritten."""
    try:
        seen = check(
            subject.spelled,
            *subject.args(subject.dtype),
            passes=family(*subject.passes),
            whole=False,
            tol=1e-5 if subject.dtype == torch.float32 else 2e-2,
        )
    except AssertionError as error:
        assert "relative error" in str(error), error
        return False
    assert any(subject.op in name for name in seen.ops), seen.refused
    return True


def model_holds(subject: Subject, monkeypatch) -> bool:
    """Whether a training step is verified."""
    verification = importlib.import_module("tunecompile.verification.verify")
    monkeypatch.setattr(verification, "_switch_off", lambda *_: [])  # which rewrite it is, is found elsewhere
    model, batch = subject.model()
    tunecompile.optimize(model, executor="eager")
    result = tunecompile.verify(model, batch)
    names = [name for region in tunecompile.report(model).regions for name in region.providers]
    assert any("_planted" in name for name in names) or "cross_entropy" in subject.op, names
    return result.passed


# ---------------------------------------------------------------- the subjects


def model(family: str = "llama", full: bool = False, quantise: bool = False, **changes) -> tuple[torch.nn.Module, dict]:
    """With norms and biases that are not all alike, as after some training."""
    made = zoo.make(family, num_hidden_layers=2, **changes)
    for name, p in made.named_parameters():
        if p.dim() == 1:
            torch.nn.init.normal_(p, mean=0.0 if "bias" in name or family.startswith("gemma") else 1.0, std=0.2)
    made = zoo.quantize(made) if quantise else made
    return (made if full else zoo.adapt(made)).train(), zoo.batch()


def a_head(**options) -> dict[str, Any]:
    """A subject's functions for one way to compute the loss."""
    given = {"scale": 1.0, "softcap": 0.0, "smoothing": 0.0} | options
    return {
        "file": "linear_cross_entropy",
        "op": "linear_cross_entropy",
        "spelled": lambda x, w, labels: head(x, w, labels, **options),
        "call": lambda op, x, w, labels: (
            op(x, w, None, None, None, labels, given["scale"], given["softcap"], -100, given["smoothing"], True, True)[
                0
            ]
            * 0.37
        ),
        "args": lambda dtype: [
            random(7, 5, dtype=dtype),
            random(9, 5, dtype=dtype),
            torch.tensor([3, -100, 0, 8, -100, 1, 2]),
        ],
        "places": (
            (f"{RECOGNIZE}.linear_cross_entropy", "linear_cross_entropy"),
            ("tunecompile.runtime.loss_head.losses", "linear_cross_entropy"),
        ),
        "passes": ("linear_cross_entropy",),
    }


def a_lora(**options) -> dict[str, Any]:
    return {
        "file": "lora",
        "op": "lora_linear",
        "spelled": adapted,
        "call": by_lora,
        "places": ((f"{RECOGNIZE}.lora", "lora_linear"),),
        "passes": ("lora",),
        "args": lambda dtype: [
            random(2, 3, 8, dtype=dtype),
            random(6, 8, dtype=dtype, grad=False),
            random(2, 8, dtype=dtype),
            random(6, 2, dtype=dtype),
            *([random(6, dtype=dtype)] if options else []),
        ],
    }


def a_norm(spelled, offset, first, model, dtype=torch.float32) -> Subject:
    return Subject(
        "norms/rms_norm",
        "rms_norm",
        spelled,
        lambda op, x, w: op(x, w, 0.1, offset, first),
        lambda dtype: [random(3, 6, dtype=dtype), random(6, dtype=dtype)],
        ((f"{RECOGNIZE}.norms.rms_norm", "op"),),
        ("rms_norm",),
        model,
        dtype=dtype,
    )


def a_layer_norm(name, spelled, inputs, model=None) -> Subject:
    return Subject(
        "norms/layer_norm",
        name,
        spelled,
        lambda op, *args: op(*args, 0.1, args[0].dtype),
        lambda dtype: [
            *(random(3, 6, dtype=dtype) for _ in range(inputs)),
            *(random(6, dtype=dtype) for _ in range(2)),
        ],
        ((f"{RECOGNIZE}.norms.layer_norm", name),),
        ("layer_norm", "add_layer_norm"),
        model,
    )


def a_modulated_norm(name, spelled, inputs) -> Subject:
    return Subject(
        "norms/modulated_norm",
        name,
        spelled,
        lambda op, *args: op(*args[:-2], args[-2][:, None], args[-1][:, None], 0.1, 1.0, True, args[0].dtype),
        lambda dtype: [
            *(random(2, 3, 6, dtype=dtype) for _ in range(inputs)),
            *(random(2, 6, dtype=dtype) for _ in range(2)),
        ],
        ((f"{RECOGNIZE}.norms.modulated_norm", name),),
        ("layer_norm", "rms_norm", "modulated_norm", "add_modulated_norm"),
    )


def a_rotation(spelled, interleaved, model) -> Subject:
    return Subject(
        "rope",
        "rope",
        spelled,
        lambda op, x, cos, sin: op(x, cos, sin, interleaved),
        lambda dtype: [
            random(2, 3, 5, 4, dtype=dtype),
            *(random(2, 1, 5, 4, dtype=dtype, grad=False) for _ in range(2)),
        ],
        ((f"{RECOGNIZE}.rope", "op"),),
        ("rope",),
        model,
    )


def a_gate(activation, model) -> Subject:
    function = F.silu if activation == "silu" else lambda gate: F.gelu(gate, approximate="tanh")
    return Subject(
        "swiglu",
        "gated_activation",
        lambda gate, up: function(gate) * up,
        lambda op, gate, up: op(gate, up, activation),
        lambda dtype: [random(3, 6, dtype=dtype), random(3, 6, dtype=dtype)],
        ((f"{RECOGNIZE}.swiglu", "op"),),
        ("swiglu",),
        model,
    )


def a_clamped_gate() -> Subject:
    def spelled(both):
        gate, up = both[..., ::2].clamp(min=None, max=1.0), both[..., 1::2].clamp(min=-1.0, max=1.0)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.7))

    def within_a_limit():
        made, inputs = model("gpt_oss")
        for module in made.modules():
            if "limit" in vars(module):
                module.limit = 0.1  # its own is 7, which no gate of so small a model reaches
        return made, inputs

    return Subject(
        "swiglu",
        "clamped_gate",
        spelled,
        lambda op, both: op(both, 1.7, 1.0),
        lambda dtype: [random(3, 12, dtype=dtype)],
        ((f"{RECOGNIZE}.swiglu", "clamped_gate"),),
        ("swiglu",),
        within_a_limit,
    )


def an_attention(window, model, causal=True, softcap=0.0) -> Subject:
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    return Subject(
        "attention/documents",
        "varlen_attention",
        lambda q, k, v: attention(q, k, v, window, causal=causal, softcap=softcap),
        lambda op, q, k, v: op(q, k, v, ends, 5, 0.7, window, None, causal, softcap)[0],
        lambda dtype: [random(8, 4, 3, dtype=dtype), random(8, 2, 3, dtype=dtype), random(8, 2, 3, dtype=dtype)],
        ((f"{RECOGNIZE}.document_attention", "varlen_attention"),),
        model=model,
    )


BRANCHES = ((-1, 3), (0, 2), (0, 2), (-1, 1))  #: parents and lengths


def _tree() -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
    offsets, tree, places = tree_of(BRANCHES)
    return offsets, 3, tree, places


SUBJECTS = {
    "norm": a_norm(norm, 0.0, True, lambda: model(full=True)),
    "Gemma's norm": a_norm(gemma_norm, 1.0, False, lambda: model("gemma2", full=True), torch.bfloat16),
    "residual norm": Subject(
        "norms/rms_norm",
        "add_rms_norm",
        residual_norm,
        lambda op, x, r, w: op(x, r, w, 0.1, 0.0, True),
        lambda dtype: [random(3, 6, dtype=dtype), random(3, 6, dtype=dtype), random(6, dtype=dtype)],
        ((f"{RECOGNIZE}.norms.rms_norm", "add_rms_norm"),),
        ("rms_norm", "add_rms_norm"),
        lambda: model(full=True),
    ),
    "layer norm": a_layer_norm("layer_norm", layer_norm, 1, lambda: model("phi", full=True)),
    "residual layer norm": a_layer_norm("add_layer_norm", residual_layer_norm, 2),
    "modulated norm": a_modulated_norm("modulated_norm", modulated_norm, 1),
    "residual modulated norm": a_modulated_norm("add_modulated_norm", residual_modulated_norm, 2),
    "SwiGLU": a_gate("silu", model),
    "GeGLU": a_gate("gelu_tanh", lambda: model("gemma2")),
    "clamped gate": a_clamped_gate(),
    "weighted gate": Subject(
        "swiglu",
        "weighted_gate",
        lambda gate, up, weights: torch.nn.functional.silu(gate) * up * weights,
        lambda op, *of: op(*of, "silu"),
        lambda dtype: [random(3, columns, dtype=dtype) for columns in (6, 6, 1)],
        ((f"{RECOGNIZE}.experts.weighted_gate", "weighted_gate"),),
        ("swiglu", "weighted_gate"),
    ),
    "RoPE": a_rotation(rotated, False, model),
    "RoPE of pairs": a_rotation(rotated_in_pairs, True, lambda: model("helium")),
    "LoRA": Subject(**a_lora(), model=model),
    "LoRA and bias": Subject(**a_lora(bias=True), model=lambda: model("qwen2")),
    "NF4": Subject(
        "nf4",
        "dequantize_4bit",
        lambda x, layer: layer(x),
        dequantised,
        lambda dtype: [random(4, 128, dtype=dtype), quantised()],
        ((f"{RECOGNIZE}.nf4", "dequantize_4bit"), ("tunecompile.integrations.bitsandbytes", "dequantize_4bit")),
        ("nf4",),
        lambda: model(quantise=True),
        by_bitsandbytes,
    ),
    "loss": Subject(**a_head(), model=model),
    "capped loss": Subject(**a_head(softcap=2.0), model=lambda: model("gemma2", final_logit_softcapping=1.0)),
    "scaled loss": Subject(**a_head(scale=3.0)),
    "smoothed loss": Subject(**a_head(smoothing=0.2)),
    **{name: Subject(f"experts/{file}", *case, ()) for name, (file, *case) in EXPERT_CASES.items()},
    **{name: Subject(f"recurrent/{file}", *case, ()) for name, (file, *case) in RECURRENT_CASES.items()},
    "attention": an_attention(0, lambda: (model()[0], padded())),
    "attention with sinks": Subject(
        "attention/documents",
        "varlen_attention",
        lambda q, k, v, sinks: attention(q, k, v, 0, sinks),
        lambda op, q, k, v, sinks: op(q, k, v, torch.tensor([0, 3, 8], dtype=torch.int32), 5, 0.7, 0, sinks, True, 0.0)[
            0
        ],
        lambda dtype: [
            *(random(8, heads, 3, dtype=dtype) for heads in (4, 2, 2)),
            random(4, dtype=dtype),
        ],
        ((f"{RECOGNIZE}.document_attention", "varlen_attention"),),
        model=lambda: (model("gpt_oss", full=True)[0], padded()),
    ),
    "attention of images": an_attention(0, None, causal=False),
    "attention with a cap": an_attention(
        0,
        lambda: (model("gemma2", attn_logit_softcapping=0.02, attn_implementation="eager")[0], padded()),
        softcap=1.0,
    ),
    "attention of whole rows": Subject(
        "attention/causal",
        "causal_attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7, enable_gqa=True),
        lambda op, q, k, v: op(q, k, v, 0.7)[0],
        lambda dtype: [random(2, heads, 5, 3, dtype=dtype) for heads in (4, 2, 2)],
        ((f"{RECOGNIZE}.causal_attention", "causal_attention"),),
    ),
    "attention of one query": Subject(
        "attention/causal",
        "one_query_attention",
        one_query,
        lambda op, q, k, v, sinks, mask: op(q, k, v, mask, 0.7, sinks, 1.5),
        lambda dtype: [
            *(random(2, heads, n, 3, dtype=dtype, grad=False) for heads, n in ((4, 1), (2, 5), (2, 5))),
            *(
                random(4, dtype=dtype, grad=False),
                torch.tensor([0.0, -1e9, 0.3, 0.0, -1e9], dtype=dtype).expand(2, 1, 1, 5),
            ),
        ],
        ((f"{RECOGNIZE}.causal_attention", "one_query_attention"),),
        ("one_query_attention",),
    ),
    "attention of branches": Subject(
        "attention/branches",
        "branch_attention",
        lambda q, k, v: dense(q, k, v, BRANCHES, 0.7, 3, 1.0)[0],
        lambda op, q, k, v: op(q, k, v, *_tree(), 0.7, 3, None, 1.0)[0],
        lambda dtype: [random(8, heads, 3, dtype=dtype) for heads in (4, 2, 2)],
        ((f"{RECOGNIZE}.document_attention", "branch_attention"),),
        model=lambda: (
            model("gemma2", attn_logit_softcapping=0.02, attn_implementation="eager", sliding_window=30)[0],
            branches(side="right"),
        ),
    ),
    "attention with dropout": Subject(
        "attention/dropout",
        "dropout_attention",
        lambda q, k, v: by_factors(q, k, v, 0.4),
        lambda op, q, k, v: op(q, k, v, torch.tensor([0, 5], dtype=torch.int32), 5, 0.7, 0, False, 0.4, SEED)[0],
        lambda dtype: [random(5, heads, 3, dtype=dtype) for heads in (4, 2, 2)],
        ((f"{RECOGNIZE}.document_attention", "dropout_attention"),),
    ),
    "attention in a window": an_attention(2, lambda: (model("mistral", sliding_window=4)[0], padded())),
}
