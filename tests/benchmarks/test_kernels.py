"""The kernel benchmarks run: every case, tiny, in Triton's interpreter where there is no GPU. And the table of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report

KERNELS = Path(report.__file__).parent / "kernels"
WRONG_IN_THE_INTERPRETER = (
    "lora_mlp",
    "eight_bits",
)  # products in bf16, rounding to e4m3 (see tests/templates/conftest.py)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("kernels") / "kernels.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, KERNELS, "--dry", "--out", out],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text())


@pytest.mark.slow
def test_templates_and_references_run_in_every_case(result):
    own = [row for row in result["rows"] if row["system"] in ("template", "Inductor", "")]
    assert not [row for row in own if "failed" in row]
    cases = {row["shown"] for row in own}
    assert len(cases) >= 17 and all(
        {"template", "Inductor"} <= {row["system"] for row in own if row["shown"] == case} for case in cases
    )
    assert {row["family"] for row in own} == {
        "rms_norm",
        "swiglu",
        "cross_entropy",
        "nf4",
        "lora",
        "lora_mlp",
        "eight_bits",
    }


@pytest.mark.slow
def test_results_agree(result):
    off = [
        row
        for row in result["rows"]
        if row.get("error", 0.0) > 0.02
        and row["family"] not in WRONG_IN_THE_INTERPRETER
        and not row["system"].startswith(("Liger", "Unsloth"))
    ]
    assert not off, off


@pytest.mark.slow
def test_the_readmes_table_names_the_fastest_peer(result):
    row = {"family": "swiglu", "case": "8x4 forward", "shown": "SwiGLU", "percent": 91.4}
    rows = [
        {**row, "system": "Inductor", "ms": 0.5},
        {**row, "system": "Liger, fused", "ms": 0.42},
        {**row, "system": "Unsloth", "failed": "not installed"},
        {**row, "system": "Liger", "ms": 0.6},
        {**row, "system": "template", "ms": 0.4},
        {**row, "shown": "", "system": "template", "ms": 7.77},
    ]
    text = report.render_kernels({**result, "rows": rows})
    assert "| SwiGLU | 8x4 forward | 0.400 | 0.500 | 0.420 (Liger, fused) | 91 % |" in text and "7.77" not in text
    assert report.render_kernels(None) == "" and report.render_kernels({**result, "rows": rows[:2]}) == ""
    assert len(report.render_kernels(result).splitlines()) > 20
