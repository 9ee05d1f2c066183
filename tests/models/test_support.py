"""Every cell of the README's table of what is supported: losses and gradients as without `optimize`."""

import math
import os
from statistics import median

import pytest
import torch

import tunecompile
from tests.models import zoo
from tests.models.support import CELLS, FOUND, Cell

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
DEVICE = os.environ.get("SUPPORT_DEVICE", "cpu")  #: benchmarks/support.py runs them on a GPU, through Inductor
LIMIT = 2e-4 if DEVICE == "cpu" else 1e-3
FALLEN = ("eagerly", "in pieces", "without rewrites", "run as they are", "runs as it is", "is left alone")


def built(cell: Cell) -> torch.nn.Module:
    try:
        with torch.device(DEVICE if cell.section == "base" else "cpu"):  # some of PEFT's adapters draw with a generator of the CPU
            return cell.build().to(DEVICE)
    except ImportError as error:
        pytest.skip(f"not installed: {error}")
    except (AttributeError, TypeError) as error:
        pytest.skip(f"this version has it not: {error}")


def errors(gradients: dict, truth: dict) -> dict[str, float]:
    """Relative; the q and k of a single token get noise, which counts by the largest gradient."""
    floor = max(1e-12, 1e-4 * max(g.norm().item() for g in truth.values()))
    return {name: ((g.double() - truth[name].double()).norm() / truth[name].double().norm().clamp_min(floor)).item() for name, g in gradients.items()}


@pytest.mark.parametrize("cell", [pytest.param(cell, id=str(cell), marks=[] if cell.quick else pytest.mark.slow) for cell in CELLS])
def test_cell(cell, record_property):
    """Three batches. In half precision, what counts is the distance to the same weights in fp32, beside eager's."""
    pytest.importorskip("peft")
    plain, model = built(cell), tunecompile.optimize(built(cell), executor="eager" if DEVICE == "cpu" else "inductor")
    half = any(p.is_floating_point() and p.dtype in (torch.bfloat16, torch.float16) for p in plain.parameters())
    exact = zoo.in_fp32(plain) if half else plain
    for seed in range(3):
        shape = dict(seed=seed, rows=2, length=16 + 4 * (seed > 1))
        steps = [zoo.step(m, zoo.batch(**shape, device=DEVICE)) for m in ((model, plain, exact) if half else (model, plain))]
        (loss, gradients), (plain_loss, plain_gradients), (_, truth) = steps[0], steps[1], steps[-1]
        assert set(gradients) == set(plain_gradients)
        if cell.random:
            assert math.isfinite(loss) and all(g.isfinite().all() for g in gradients.values())
            continue
        assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-2 if half else 1e-5)
        off, own = (errors(found, truth) for found in (gradients, plain_gradients))
        if half:
            assert median(off.values()) < 1.1 * median(own.values()) + 1e-4
        for name, error in off.items():
            assert error < (3 * own[name] + 5e-3 if half else LIMIT), f"{name}: {error:.1e}, eager's {own[name]:.1e}"
    told = tunecompile.report(model)
    found, rewritten = (sum(getattr(m, key) for m in told.matches) for key in ("found", "rewritten"))
    record_property("found", found)
    record_property("rewritten", rewritten)
    record_property("refused", "; ".join(dict.fromkeys(reason for m in told.matches for reason in m.refused)))
    record_property("notes", "; ".join(note for note in told.notes if any(word in note for word in FALLEN)))
    assert found == 0 or rewritten or any(m.refused for m in told.matches)
    expected = FOUND.get(cell.name, {})
    assert {m.family: (m.found, m.rewritten) for m in told.matches if m.family in expected} == expected
    assert not expected or not any("pieces" in note for note in told.notes), told.notes
