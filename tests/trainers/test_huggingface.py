"""The callback of Trainers, and `tunecompile run`: the same losses as without, and a report of what was rewritten."""

import json
import subprocess
import sys

import pytest

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import adapted_layers, small
from tests.support.trainers import Rows, arguments, collate, curve
from tunecompile.cli.commands import run
from tunecompile.errors import BadOption, NotOptimized
from tunecompile.trainers.door import RUN

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def trainer(folder, callbacks, **given):
    given = given or {"model": adapted_layers()}
    options = arguments(transformers.TrainingArguments, folder, max_steps=2, eval_strategy="no")
    return transformers.Trainer(args=options, data_collator=collate, train_dataset=Rows(), callbacks=callbacks, **given)


def test_a_callback_is_all_a_trainer_needs(tmp_path):
    plain = trainer(tmp_path, [])
    plain.train()
    door = tunecompile.Callback(watch=True, executor="eager")
    with pytest.raises(NotOptimized):
        door.report()
    ours = trainer(tmp_path, [door])
    assert tunecompile.report(ours.model) is not None, "before training begins"
    ours.train()
    assert curve(ours) == pytest.approx(curve(plain), rel=1e-4) and len(curve(ours)) == 4
    assert {match.family: match.rewritten for match in door.report().matches}["lora"] == 1
    assert door.watcher.steps == 2 and door.watcher.findings == []


def test_the_environment_switches_it_off(tmp_path, monkeypatch):
    """To the end: what is not optimized has no report."""
    monkeypatch.setenv("TUNECOMPILE", "0")
    door = tunecompile.Callback()
    trainer(tmp_path, [door]).train()
    assert door.models == []


@pytest.mark.slow
def test_a_model_that_is_made_anew(tmp_path):
    door = tunecompile.Callback(executor="eager")
    made = trainer(tmp_path, [door], model_init=lambda: zoo.adapt(small()))
    (first,) = door.models
    made.train()
    assert door.models == [made.model] and tunecompile.report(made.model).matches and first is not made.model


def test_what_a_command_is_run_with(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    assert run.arguments([str(script), "--lr", "1"]) == [sys.executable, str(script), "--lr", "1"]
    assert run.arguments([sys.executable, "-m", "x"]) == [sys.executable, "-m", "x"]
    for wrong in (str(tmp_path / "other.py"), "no-such-command"):
        with pytest.raises(BadOption, match="no such"):
            run.arguments([wrong])


def test_the_command(tmp_path):
    """Options in front are ours, those behind the script are its own; its exit code is the command's."""
    testing = pytest.importorskip("typer.testing")
    from tunecompile.cli import app

    script, seen = tmp_path / "train.py", tmp_path / "seen"
    script.write_text(
        "import json, os, sys\n"
        f"open({str(seen)!r}, 'w').write(json.dumps([sys.argv[1:], json.loads(os.environ['TUNECOMPILE_RUN'])['options']]))\n"
        "sys.exit(7)\n"
    )
    done = testing.CliRunner().invoke(app, ["run", "--memory", "auto", str(script), "--memory", "own"])
    assert done.exit_code == 7 and "nothing was optimized" in done.output, done.output
    assert json.loads(seen.read_text()) == [["--memory", "own"], {"memory": "auto"}]
    done = testing.CliRunner().invoke(app, ["run", "--merge-accumulation", str(script)])
    assert json.loads(seen.read_text()) == [[], {}], "no option of optimize"
    done = testing.CliRunner(env={"TUNECOMPILE": "0"}).invoke(app, ["run", str(script)])
    assert done.exit_code == 7 and "TUNECOMPILE=0 is set" in done.output, done.output


def test_the_command_merges_accumulated_batches(tmp_path, monkeypatch):
    from tunecompile.trainers import huggingface

    for merges in (False, True):
        monkeypatch.setenv(RUN, run.environment({"memory": "1GiB"}, tmp_path / "told", merges)[RUN])
        door = huggingface.from_environment()
        assert door.merges is merges and door.options == {"memory": "1GiB"}
    monkeypatch.delenv(RUN)
    assert huggingface.from_environment().merges is False


def started(code, tmp_path, options):
    """What a process prints that `tunecompile run` starts, and what was optimized in it."""
    told = tmp_path / "told"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=run.environment(options, told),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, told.read_text().split() if told.exists() else []


def test_processes_that_train_nothing_import_nothing(tmp_path):
    other = tmp_path / "sitecustomize.py"
    other.write_text("import sys; sys.was_run = True")
    code = "import sys; print(sys.was_run, 'torch' in sys.modules, 'tunecompile' in sys.modules)"
    environment = run.environment({}, tmp_path / "told")
    environment["PYTHONPATH"] += f":{tmp_path}"
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False", "False"], found


@pytest.mark.slow
def test_a_script_that_knows_nothing_of_us(tmp_path):
    code = f"""
import torch, transformers
assert "tunecompile" in transformers.AttentionInterface() and "tunecompile" in transformers.AttentionMaskInterface()
from tests.support import zoo
from tests.trainers.test_huggingface import trainer
made = trainer({str(tmp_path)!r}, [])
made.train()
import tunecompile
print({{m.family: m.rewritten for m in tunecompile.report(made.model).matches}}["lora"])
"""
    printed, optimized = started(code, tmp_path, {"executor": "eager"})
    assert printed.split()[-1] == "1" and optimized == ["PeftModelForCausalLM"], printed


def test_options_are_handed_down(tmp_path):
    found = run.environment({"memory": "auto"}, tmp_path / "told")
    assert json.loads(found[RUN]) == {"options": {"memory": "auto"}, "told": str(tmp_path / "told")}
    assert "sitecustomize" not in sys.modules or "tunecompile" not in (sys.modules["sitecustomize"].__file__ or "")
