"""Each family against its row: what is found in a layer, and gradients as eager computes them. What changes upstream shows here first."""

import pytest

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tests.models import golden
from tests.support import zoo  # noqa: E402
from tests.support.notes import EAGER, find
from tunecompile._torch.known_bugs import BLOCKS_ACROSS_ROWS

#: norms of heads and windows of their own, and experts
QUICK = ("gemma3", "qwen3_moe")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow) for family in zoo.NAMES]
)
def test_a_familys_row(family):
    if not any(hasattr(transformers, zoo.NAMES[family][0] + head) for head in ("ForCausalLM", "LMHeadModel")):
        pytest.skip(f"transformers {transformers.__version__} has no such model")
    (row, eager), (found, error, report) = golden.expected(family), golden.table(golden.adapted(family))
    assert row == found, f"{differences(row, found)}\n{report}"
    assert error < 1e-5, f"a gradient is {error:.1e} from eager's\n{report}"
    assert eager == bool(find(report, *EAGER)) and not find(report, "compiled-without-rewrites"), (
        f"{report.notes}\n{report}"
    )


def differences(row: golden.Row, found: golden.Row) -> str:
    """In words, for the table of `tests/_torch/versions.py`."""
    return ", ".join(
        f"{name} {found.get(name, (0, 0))[1]}/{found.get(name, (0, 0))[0]}, not {row.get(name, (0, 0))[1]}/{row.get(name, (0, 0))[0]}"
        for name in {**row, **found}
        if row.get(name) != found.get(name)
    )


def test_every_family_has_a_row():
    assert all(set(rows) == set(zoo.NAMES) for rows in golden.GOLDEN.values())


@pytest.mark.slow  # a quick case of clones behind mutations: tests/passes/test_nf4.py
@pytest.mark.parametrize("family", golden.IN_4BIT)
def test_a_row_of_experts_and_linears_in_4_bits(family):
    pytest.importorskip("bitsandbytes")
    if golden.experts_run_eagerly():
        pytest.skip("experts in fp32 run eagerly with these versions")
    model = golden.in_4bit(family)
    codes = [(m, m.weight.quant_state) for m in model.modules() if hasattr(getattr(m, "weight", None), "quant_state")]
    eager_is_wrong = BLOCKS_ACROSS_ROWS.present and any(m.in_features % state.blocksize for m, state in codes)
    found, error, report = golden.table(model)
    row = golden.IN_4BIT[family]
    assert row == found, f"{differences(row, found)}\n{report}"
    assert eager_is_wrong or error < 1e-5, f"a gradient is {error:.1e} from eager's\n{report}"
    assert not find(report, *EAGER, "compiled-without-rewrites"), report
