"""What the compiler did can be read: files and artifacts of each graph, and what each pass made of its operations."""

import json
import logging
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import Graph

import tunecompile
from tests.support.models.layers import gradients, trained
from tunecompile.compiler import graph_dump
from tunecompile.compiler.partitioner import Lowering
from tunecompile.compiler.pass_manager import Context
from tunecompile.passes import PIPELINE


def rewritten(model: nn.Module) -> bool:
    """Whether its layers run as recognised."""
    return {m.family: m.rewritten for m in tunecompile.report(model).matches}.get("rms_norm") == 1


STEPS = [
    "recognize.before",
    "recognize.canonicalize",
    "recognize.swiglu",
    "recognize.rms_norm",
    "plan.before",
    "plan.remat",
    "lower.forward.before",
    "lower.forward.choose_provider",
    "lower.backward.before",
    "lower.backward.choose_provider",
]


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_every_pass_that_changed_a_graph_leaves_a_file(monkeypatch, tmp_path):
    folder = tmp_path / "not" / "there"
    monkeypatch.setenv("TUNECOMPILE_DUMP", str(folder))
    trained()
    names = files(folder)
    assert names[: len(STEPS)] == [f"{i:04d}.layers_NormedMLP.{step}.py" for i, step in enumerate(STEPS)]
    assert {name.partition(".")[2] for name in names[len(STEPS) :]} <= {"layers_NormedMLP.lower.backward.cleanup.py"}
    for name in names:
        compile((folder / name).read_text(encoding="utf-8"), name, "exec")
    before, after = ((folder / names[i]).read_text(encoding="utf-8") for i in (2, 3))
    assert after.startswith(
        f"# region layers_NormedMLP, stage recognize, dynamo graph, process {os.getpid()}\n"
        "# after pass rms_norm: +1 tunecompile.rms_norm  -1 add  -1 mean  -2 mul  -1 pow  -1 rsqrt\n"
    )
    assert "rsqrt" in before.split("\n\n", 1)[1] and "tunecompile.rms_norm" not in before
    assert "torch.ops.tunecompile.rms_norm" in after and "layers.py" in after, "with the user's lines"
    assert "MUST_SAVE" in (folder / names[5]).read_text(encoding="utf-8"), "tags are shown"


def test_graphs_without_a_module_are_written_too(tmp_path):
    """As those of backward passes may be; what did not change leaves no file."""
    graph = Graph()
    graph.output(graph.call_function(torch.sin, (graph.placeholder("x"),)))
    dump = graph_dump.GraphDump("layer", tmp_path, False)
    for _ in range(2):
        dump.show("lower", "backward", None, graph, {})
    (file,) = tmp_path.iterdir()
    assert file.name == "0000.layer.lower.backward.before.py" and "torch.sin(x)" in file.read_text(encoding="utf-8")


def test_variants_models_and_earlier_runs_keep_their_files(monkeypatch, tmp_path):
    (tmp_path / "0041.other.py").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setenv("TUNECOMPILE_DUMP", str(tmp_path))
    model = trained()
    once = files(tmp_path)
    first = {name: (tmp_path / name).read_bytes() for name in once}
    assert once[1].startswith("0042.layers_NormedMLP.recognize.before")
    model.layers[0].gradient_checkpointing = True  # of all layers, they would be a budget
    gradients(model)
    trained()
    names = files(tmp_path)
    assert all((tmp_path / name).read_bytes() == content for name, content in first.items())
    assert Counter(name.split(".")[1] for name in names)["layers_NormedMLP_checkpointed"] >= len(STEPS)
    numbers = [int(name[:4]) for name in names if name[0].isdigit()]
    assert numbers == list(range(41, 41 + len(numbers)))


def test_a_number_that_another_process_took_is_left_to_it(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(()))  # as if all had looked at the same time
    for text in "abc":
        graph_dump._write(tmp_path, "layer.plan.remat", text)
    assert [(tmp_path / f"{i:04d}.layer.plan.remat.py").read_text() for i in range(3)] == ["a", "b", "c"]


def test_a_folder_that_cannot_be_written_costs_one_warning(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TUNECOMPILE_DUMP", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING, "tunecompile"):
        model, _ = trained(), trained()
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1
    assert rewritten(model)


def test_a_graph_that_cannot_be_printed_is_compiled_all_the_same(monkeypatch, tmp_path):
    monkeypatch.setenv("TUNECOMPILE_DUMP", str(tmp_path))
    monkeypatch.setattr(graph_dump, "_readable", lambda graph: 1 / 0)
    assert rewritten(trained()) and not files(tmp_path)


def test_no_dump_is_requested(monkeypatch):
    monkeypatch.delenv("TUNECOMPILE_DUMP", raising=False)
    monkeypatch.setattr(graph_dump.GraphDump, "show", lambda *_: pytest.fail("shown"))
    trained()


def test_trials_of_a_planner_are_not_shown(monkeypatch, tmp_path):
    monkeypatch.setenv("TUNECOMPILE_DUMP", str(tmp_path))
    trained(memory="1GiB")
    assert Counter(name.partition(".")[2] for name in files(tmp_path) if ".before." in name) == Counter(
        f"layers_NormedMLP.{step}.py" for step in STEPS if step.endswith("before")
    )


def test_what_is_shown_comes_from_no_cache(tmp_path):
    shown, traced, plain = (
        Context("layer", dump=graph_dump.GraphDump("layer", tmp_path, False)),
        Context("layer", dump=graph_dump.GraphDump("layer", None, True)),
        Context("layer"),
    )
    assert Lowering(PIPELINE, shown).uuid() is None
    assert Lowering(PIPELINE, traced).uuid() == Lowering(PIPELINE, plain).uuid() is not None


def test_the_report_tells_what_each_pass_did():
    model = trained()
    (region,) = tunecompile.report(model).to_dict()["regions"]
    changes = {(c["stage"], c["graph"], c["name"]): c["operations"] for c in json.loads(json.dumps(region["changes"]))}
    assert changes["recognize", "dynamo", "rms_norm"] == {
        "tunecompile.rms_norm": 1,
        "add": -1,
        "mean": -1,
        "mul": -2,
        "pow": -1,
        "rsqrt": -1,
    }
    assert changes["recognize", "dynamo", "swiglu"] == {"tunecompile.gated_activation": 1, "silu": -1, "mul": -1}
    assert changes["lower", "forward", "choose_provider"]["tunecompile.gated_activation"] == -1
    assert changes["lower", "backward", "choose_provider"]["tunecompile.rms_norm_backward"] == -1
    assert all(count for difference in changes.values() for count in difference.values())
    assert "aten.mul" not in str(tunecompile.report(model)), "the printed report stays short"


@pytest.mark.parametrize(
    "folder, traces, asked", [("a", False, True), ("", True, True), ("", False, False), ("a", True, True)]
)
def test_a_dump_as_the_environment_requests_it(monkeypatch, folder, traces, asked):
    monkeypatch.setenv("TUNECOMPILE_DUMP", folder)
    monkeypatch.setattr(graph_dump, "is_tracing", lambda: traces)
    made = graph_dump.GraphDump.begin("layer")
    assert (made is not None) == asked
    if made is not None:
        assert (made.region, made.folder, made.traces) == ("layer", Path(folder) if folder else None, traces)


def test_a_folder_that_cannot_be_written_is_named_once(tmp_path, caplog):
    (file := tmp_path / "file").write_text("")
    graph_dump._warn.cache_clear()
    graph = Graph()
    graph.output(graph.call_function(torch.sin, (graph.placeholder("x"),)))
    for region in ("first", "second"):
        graph_dump.GraphDump(region, file, False).show("plan", "joint", None, graph, {})
    (said,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert f"written to {file}: FileExistsError" in said
