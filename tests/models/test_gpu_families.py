"""Families compiled for real on a GPU, in five batches of changing shapes: losses and gradients against fp32, compilations.

pytest -m "gpu and families" -n 14      # benchmarks/suites/changing_shapes.py writes the same as a table
"""

import pytest

from tests.support.matrix.compiled import CELLS, EagerFails, run

pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.families, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name, mode", CELLS, ids=[f"{name}, {mode}" for name, mode in CELLS])
def test_batches_of_changing_shapes(name, mode):
    try:
        row = run(name, mode, "cuda")
    except EagerFails as error:
        pytest.skip(f"not without us either: {error}")
    assert not row["wrong"], row
    assert not any(note.startswith("compiled-without-rewrites") for note in row["notes"]), row["notes"]
    assert max(row["compiles"], default=0) <= 4 * max(row["pieces"], default=1), row
