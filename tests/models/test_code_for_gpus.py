"""Inductor generates code for a GPU of whole families' layers, in shapes that change. A GPU shows what it computes."""

import json

import pytest

from tests.support.fresh_process import STANDS_IN, printed

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("triton")
pytestmark = [*STANDS_IN, pytest.mark.slow]


@pytest.mark.parametrize(
    "name, mode",
    [
        ("Llama 3.2 Vision", "nf4"),  # rows of cross attention are an expression: a template writes them in one part
        ("qwen3_moe", "nf4"),
    ],
)
def test_no_graph_is_left_without_rewrites(name, mode):
    pytest.importorskip("bitsandbytes")
    rows = [json.loads(line) for line in printed("-m", "tests.support.matrix.gpu_code", name, mode).splitlines()]
    assert {row["backward"] for row in rows} == {False, True}
    assert not [row for row in rows if row["error"]]
