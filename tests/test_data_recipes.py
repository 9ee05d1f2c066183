"""The recipes for data run as they stand on the page."""

import json
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "pages" / "guides" / "data.md"


@pytest.mark.filterwarnings("ignore")
def test_the_recipes_run(tmp_path):
    for package in ("datasets", "trl"):
        pytest.importorskip(package)
    file = tmp_path / "rows.jsonl"
    row = {"instruction": "find a big word", "input": "", "output": "elephantine"}
    file.write_text("\n".join(json.dumps({**row, "input": text}) for text in ("", "in this text")))
    names: dict = {"file": str(file), "folder": str(tmp_path)}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S):
        exec(code.replace("SFTConfig(", "SFTConfig(use_cpu=True, bf16=False, "), names)
    rows = names["rows"]
    assert len(rows) == 6 and set(rows.column_names) == {"prompt", "completion"}
    assert rows[0]["prompt"] == [{"role": "user", "content": "find a big word"}]
    assert rows[3]["prompt"][0]["content"] == "find a big word\n\nin this text"
    assert all(each["completion"] == [{"role": "assistant", "content": "elephantine"}] for each in rows)
    names["random"].seed(0)
    assert {names["reworded"]("big dog", 1.0) for _ in range(20)} == {"large dog", "huge dog"}
    assert names["packed"].packing and names["answers"].assistant_only_loss
