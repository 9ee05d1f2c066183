"""A saved result is read back as it was written; anything else is refused with the reason and the mend."""

import json
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from tunecompile.cli.compare.result import Result, load_result
from tunecompile.errors import NotAResult, UnknownSchema

MEASURED = Path(__file__).parents[3] / "benchmarks" / "results"
STEPS = sorted(path for path in MEASURED.glob("llama-*.json"))


@pytest.fixture
def held():
    return json.loads(STEPS[0].read_text())


def write(folder, held):
    path = folder / "report.json"
    path.write_text(held if isinstance(held, str) else json.dumps(held))
    return path


def test_measured_results_stay_readable():
    assert STEPS and all(load_result(path) == json.loads(path.read_text()) for path in STEPS)


def test_another_version_is_refused_with_the_command_that_makes_it_again(held, tmp_path):
    with pytest.raises(
        UnknownSchema, match=r"schema 7, .* reads schema 1\. Measure it again .*tunecompile compare --model m"
    ):
        load_result(write(tmp_path, held | {"schema": 7, "command": "tunecompile compare --model m"}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: "{", "JSONDecodeError"),
        (lambda held: [held], "no 'schema'"),
        (lambda held: held | {"runs": []}, "there are no runs"),
        (lambda held: held | {"machine": {}}, "machine.gpu: Field required"),
        (
            lambda held: held | {"runs": [held["runs"][0] | {"tokens_per_s": None}]},
            "runs.0: .* a run that is ok needs tokens_per_s",
        ),
        (lambda held: held | {"runs": [held["runs"][0] | {"losses": ["low"]}]}, r"runs.0.losses.0: "),
    ],
)
def test_what_is_no_result_is_refused_at_its_field(held, tmp_path, change, says):
    with pytest.raises(NotAResult, match=f"report.json is no result .*{says}"):
        load_result(write(tmp_path, change(held)))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(NotAResult, match="FileNotFoundError"):
        load_result(tmp_path / "absent.json")


def test_there_is_a_json_schema_of_it():
    made = Result.model_json_schema()
    assert made["properties"]["schema"]["const"] == 1 and "tokens_per_s" in made["$defs"]["Run"]["properties"]
