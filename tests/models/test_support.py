"""Every row of the support matrix of the docs: losses, gradients and trained weights as without `optimize`."""

import pytest

import tunecompile
from tests.support.matrix.cells import FOUND, cells
from tests.support.matrix.follow import built, follow_draws, follow_run, follow_steps
from tests.support.notes import BROKEN, EAGER, find

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
FALLEN = (  #: in the order in which the table of the docs takes one
    *EAGER,
    "given-up",
    *BROKEN,
    "compiled-without-rewrites",
    "head-not-called",
    "new-layers",
    "no-output-embedding",
    "weights-outside-layers",
)


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=str(cell), marks=[] if cell.quick else pytest.mark.slow) for cell in cells()]
)
def test_cell(cell, record_property, tmp_path):
    pytest.importorskip("peft")
    try:
        built(cell)
    except ImportError as error:
        pytest.skip(f"not installed: {error}")
    except (AttributeError, TypeError) as error:
        pytest.skip(f"this version has it not: {error}")
    model = follow_run(cell, tmp_path) if cell.run else follow_draws(cell) if cell.random else follow_steps(cell)
    told = tunecompile.report(model)
    found, rewritten = (sum(getattr(m, key) for m in told.matches) for key in ("found", "rewritten"))
    record_property("found", found)
    record_property("rewritten", rewritten)
    record_property("refused", "; ".join(dict.fromkeys(reason for m in told.matches for reason in m.refused)))
    fallen = sorted((note for note in told.notes if note.code in FALLEN), key=lambda note: FALLEN.index(note.code))
    record_property("notes", "; ".join(fallen))
    assert found == 0 or rewritten or any(m.refused for m in told.matches)
    expected = FOUND.get(cell.name, {})
    assert {m.family: (m.found, m.rewritten) for m in told.matches if m.family in expected} == expected
    assert not expected or not find(told, *BROKEN), told.notes
    graphs = [region.compiles for region in told.regions]
    assert cell.section != "adapter" or max(graphs) <= 4 or find(told, *EAGER, "given-up"), told
    assert cell.compiles is None or all(region.compiles <= cell.compiles for region in told.regions), told
