"""Each family against its row: what is found in a layer, and gradients as eager computes them. What changes upstream shows here first."""

import pytest

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tests.models import golden, zoo  # noqa: E402

MAJOR = int(transformers.__version__.partition(".")[0])
QUICK = ("phi3", "granite", "olmo2", "cohere2", "hunyuan", "glm4", "qwen3_moe")  #: each is unlike the others; test_families.py has the commonest
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("family", [pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow) for family in zoo.NAMES])
def test_a_familys_row(family):
    if not hasattr(transformers, f"{zoo.NAMES[family][0]}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no such model")
    assert MAJOR in golden.GOLDEN, f"no table for transformers {MAJOR} yet: python -m tests.models.golden prints it"
    found, error, report = golden.table(family)
    assert found == golden.GOLDEN[MAJOR][family], report
    assert error < 1e-5 and not [note for note in report.notes if "eagerly" in note or "without rewrites" in note], (error, report)


def test_every_family_has_a_row():
    assert all(set(rows) == set(zoo.NAMES) for rows in golden.GOLDEN.values())
