"""What hosts that read files are given: a tiny model with its tokenizer, and rows of text; and what they logged."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.matrix.trl import rows_of_words, words
from tests.support.models.pairs import small


def model_folder(folder: Path) -> str:
    small(pad_token_id=0, eos_token_id=255, bos_token_id=255).save_pretrained(folder / "model")
    words().save_pretrained(folder / "model")
    return str(folder / "model")


def data_file(folder: Path, **columns: slice) -> str:
    """JSON Lines: each column has these words of a row."""
    file = folder / "rows.jsonl"
    rows = [{name: " ".join(row[part]) for name, part in columns.items()} for row in rows_of_words()]
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def losses(output: Path) -> list[float]:
    """Of the last checkpoint's `trainer_state.json`, or of the folder's own."""
    state = sorted(output.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)[-1]
    return [entry["loss"] for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]


def assert_rewritten(report) -> None:
    found = {match.family: match.rewritten for match in report.matches}
    assert found["lora"] == 7 and found["linear_cross_entropy"] == 1, report
