"""The page of a model: what the report knows, and one layer's graph before and after, in a browser too."""

import dataclasses
import importlib.util
import json
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tunecompile
from tests.support import zoo
from tunecompile.compiler import attention_backend
from tunecompile.compiler import graph_snapshot as snapshots
from tunecompile.compiler.graph_snapshot import Box, GraphSnapshot
from tunecompile.errors import MissingExtra, NotOptimized
from tunecompile.report.explain import compare, fields

pytest.importorskip("jinja2")


class Layer(nn.Module):
    """A norm that is none, a gate that is read twice, and a norm."""

    def __init__(self):
        super().__init__()
        self.weight, self.second = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        h = self.weight * (x / torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        g = F.silu(self.gate(h))
        x = x + self.down(g * self.up(h) + g)
        return self.second * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def trained(model: nn.Module, *rows: int) -> nn.Module:
    tunecompile.optimize(model.train(), executor="eager")
    for n in rows or (3,):
        model(torch.randn(n, 16)).backward()
    return model


@pytest.fixture(scope="module")
def llama():
    """Of two layers under LoRA, optimized and trained for a step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = tunecompile.optimize(zoo.adapt(zoo.make("llama", num_hidden_layers=2)), executor="eager")
    zoo.step(model, zoo.batch())
    return model


def context_of(model: nn.Module, place: int = -1):
    (region,) = model._tunecompile.regions
    return [context for backend in region.backends.values() for context in backend.contexts][place]


def test_what_cannot_be_shown_is_said(monkeypatch, tmp_path):
    with pytest.raises(NotOptimized):
        tunecompile.explain(nn.Linear(2, 2), tmp_path / "page.html")
    model = tunecompile.optimize(zoo.Stack(Layer), executor="eager")
    assert "Nothing is compiled yet" in tunecompile.explain(model, tmp_path / "page.html").read_text()
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "jinja2" else find(name, *rest)
    )
    with pytest.raises(MissingExtra, match=r"explain needs jinja2.*tunecompile\[cli\]"):
        tunecompile.explain(model, tmp_path / "other.html")


def test_each_op_knows_what_it_replaced(llama):
    context = context_of(llama)
    rows = [row for row in compare(context.before, context.after).rows if row.after and row.after.kind == "op"]
    ops = {}
    for row in rows:
        ops.setdefault(row.after.label, []).append(sorted(box.label for box in row.before))
    norm = ["add", "mean", "mul", "mul", "pow", "rsqrt"]
    rope = ["add", "cat", "mul", "mul", "neg", "slice", "slice"]
    adapted = ["add", "linear", "linear", "linear", "mul"]
    assert ops == {
        "rms_norm": [norm],
        "add_rms_norm": [sorted(["add", *norm])],
        "rope": [rope, rope],
        "gated_activation": [["mul", "silu"]],
        "lora_linear": [sorted(3 * adapted), adapted, sorted(2 * adapted), adapted],
    }
    (norm,) = (row.after for row in rows if row.after.label == "rms_norm")
    assert (norm.shape, norm.dtype, norm.weights) == ("2×16×64", "float32", ("input_layernorm.weight 64",))
    assert re.fullmatch(r"modeling_llama\.py:\d+", norm.line) and "self.weight" in norm.code


def test_both_graphs_stand_in_one_order(llama):
    """Each operation of either graph is in it once, and beside what it was."""
    context = context_of(llama)
    compared = compare(context.before, context.after)
    assert tuple(row.after for row in compared.rows if row.after) == context.after.boxes
    old = [box.name for row in compared.rows for box in row.before]
    assert sorted(old) == sorted(box.name for box in context.before.boxes) and len(old) == len(set(old))
    same = [row for row in compared.rows if row.after and row.after.name in old]
    assert len(same) > 15 and all([box.name for box in row.before] == [row.after.name] for row in same)
    assert compared.calls == (context.before.calls, context.after.calls) and compared.counts["rope"] == 2


def test_operations_that_nothing_stands_for_come_last():
    x = Box("x", "input 0", "input", "2", "float32", (), (), "", "", "")
    sin, dead = (dataclasses.replace(x, name=name, label=name, kind="call", inputs=("x",)) for name in ("sin", "dead"))
    compared = compare(GraphSnapshot((x, sin, dead)), GraphSnapshot((x, sin)))
    assert [(len(row.before), row.after) for row in compared.rows] == [(1, x), (1, sin), (1, None)]
    assert compared.rows[-1].before == (dead,)


def test_nothing_heavy_is_kept(llama):
    context = context_of(llama)
    assert len(pickle.dumps((context.before, context.after))) < 40_000
    json.dumps(tunecompile.report(llama).to_dict())


def test_a_near_miss_is_red_in_both_graphs_and_says_why(tmp_path):
    model = trained(zoo.Stack(Layer), 3, 5)
    html = tunecompile.explain(model, tmp_path / "page.html").read_text()
    missed = re.findall(r'class="call bad" data-name="(\w+)"', html)
    assert len(missed) == 4 and missed[::2] == missed[1::2]
    assert (
        html.count("not rewritten: `rsqrt` at test_explain.py:")
        == html.count("`add` uses an inner value too at test_explain.py:") - 1
        == 2
    )
    for said in (
        "expected mul(x, rsqrt(...)), found div(",
        "Recompiled because",
        "size mismatch",
        "looks like an op, and is none",
        "1 × add_rms_norm",
        "no graph breaks",
        "triton: not on a GPU",
        "+1 tunecompile.rms_norm",
    ):
        assert said in html, said
    assert html.count('class="graph"') == 1, "both graphs of the region differ in shapes only"


class Prints(Layer):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x)


def test_pieces_of_a_broken_graph_are_all_shown(tmp_path):
    html = tunecompile.explain(trained(zoo.Stack(Prints)), tmp_path / "page.html").read_text()
    assert (
        "Graph break: " in html
        and re.search(r"\d other graphs? of this region", html)
        and html.count('class="graph"') >= 2
    )


def test_calls_of_several_kinds_are_no_pieces():
    """A batch of one row is compiled apart, from the same code, under the same plan."""
    model = trained(zoo.Stack(Layer), 3, 5, 1)
    (region,) = tunecompile.report(model).regions
    assert region.compiles == 3 and region.providers["add_rms_norm: reference"] == 1 and len(region.saved_bytes) == 3, (
        region
    )


def test_times_of_attention_stand_beside_each_other(monkeypatch, tmp_path):
    times = (("cudnn", 1.25), ("flash", 2.5))
    monkeypatch.setattr(
        attention_backend,
        "choose",
        lambda gm, device: attention_backend.KernelChoice(
            ("cudnn", "flash", "efficient", "math"), "cudnn 1.25 ms, flash 2.50 ms", times
        ),
    )
    (region,) = fields(trained(zoo.Stack(Layer))._tunecompile)["regions"]
    told = region["graphs"][0]["attention"]
    assert told["rows"] == [{"kernel": "cudnn", "ms": 1.25, "times": 1.0}, {"kernel": "flash", "ms": 2.5, "times": 2.0}]
    assert (told["taken"], told["why"]) == ("cudnn", "cudnn 1.25 ms, flash 2.50 ms")


def test_code_from_a_cache_is_said_to_be(tmp_path):
    model = trained(zoo.Stack(Layer))
    context = context_of(model)
    for left_out, says in (
        ((), ""),
        (("lower",), "passes of lower did not run"),
        (("plan", "lower"), "passes of plan and lower did not run"),
    ):
        context.ran = {"recognize", "plan", "lower"} - set(left_out) if left_out else context.ran
        html = tunecompile.explain(model, tmp_path / "page.html").read_text()
        assert ("came from torch" in html) is bool(says) and says in html and html.count('class="graph"') == 1


def test_a_graph_that_cannot_be_read_costs_its_rows_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(snapshots, "_boxes", lambda *_: 1 / 0)
    model = trained(zoo.Stack(Layer))
    html = tunecompile.explain(model, tmp_path / "page.html").read_text()
    assert {m.family: m.rewritten for m in tunecompile.report(model).matches}["add_rms_norm"] == 1
    assert 'class="graph"' not in html and "This graph cannot be shown" in html
