"""A made-up result, whole: runs, gradients, verdicts."""

import pytest

pytest.importorskip("pydantic")

from tests.support.comparisons import run
from tunecompile.cli.compare.spec import Job


@pytest.fixture
def result():
    gradients = [
        {
            "parameter": f"model.layers.{i}.mlp.up_proj.lora_{ab}.weight",
            "error": 1e-3,
            "eager_error": 2e-3,
            "yardstick": 2e-3,
            "norm_ratio": 1.0,
            "has_gradient": True,
        }
        for i in range(3)
        for ab in "AB"
    ]
    away = {
        "system": "liger",
        "model": "m",
        "mode": "qlora",
        "shape": "4x64",
        "status": "not installed",
        "order": 1,
        "install": "pip install liger-kernel",
    }
    return {
        "schema": 1,
        "date": "2026-01-01T00:00:00Z",
        "commit": "0123456789abcdef",
        "dirty": True,
        "command": "tunecompile compare",
        "machine": {"gpu": None, "gpu_count": 0, "cpu": "some CPU", "memory_gib": 8.0},
        "versions": {"torch": "2.13.0"},
        "runs": [run("hf", 100.0, 0.5), away, run("tunecompile", 80.0, 10.5, break_even_step=501)],
        "matches": [{"family": "rms_norm", "found": 6, "rewritten": 5, "refused": ["x < y", "x < y"]}],
        "gradients": gradients,
        "verdicts": [
            {"name": "loss", "passed": True, "detail": "1e-6"},
            {"name": "<b>bold</b>", "passed": False, "detail": "too slow"},
        ],
        "compiler": {"regions": [{"name": "layer", "layers": 3, "compiles": 1}], "notes": ["a note"], "compiles": 1},
        "answers": [{"question": "What?", "before": "b", "after": "That.", "expected": "That.", "reloaded": "That."}],
        "settings": Job(system="hf", model="m", data="d.jsonl").to_dict()
        | {"turns": True, "rows": 10, "dropped_rows": 2},
        "reference": {"dtype": "float64", "losses": [3.0, 2.5]},
    }
