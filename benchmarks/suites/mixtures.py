"""Mixtures of experts of many families, tiny: what is found in them, and gradients beside eager's against fp32.

python benchmarks/suites/mixtures.py                          # on a CPU, op by op; two minutes a family
python benchmarks/suites/mixtures.py --only qwen3_moe --ways nf4 --executor inductor
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

import tunecompile
from tests.support import zoo
from tests.support.models.mixtures import MIXTURES, WAYS, make, prepared
from tests.support.models.packed import named
from tunecompile.errors import summary

Step = tuple[float, dict[str, Tensor]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MIXTURES), help="families")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS, help="what is trained")
    parser.add_argument("--executor", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def step(model: nn.Module, device: str) -> Step:
    loss, gradients = zoo.step(model, zoo.batch(device=device))
    return loss.item(), named(model, gradients)


def compare(family: str, way: str, executor: str, device: str) -> str:
    """A row of the table."""
    told = []
    for dtype in (torch.float32, torch.bfloat16):
        ours, dense = prepared(make(family).to(device, dtype), family, way)
        true = step(copy.deepcopy(dense).float(), device)
        theirs = step(dense, device)
        tunecompile.optimize(ours, executor=executor)
        got = step(ours, device)
        mine, eagers = (sum(zoo.errors(each[1], true[1], 1e-3).values()) / len(true[1]) for each in (got, theirs))
        told.append(f"{mine:.1e} ({eagers:.1e})" if dtype is torch.bfloat16 else f"{mine:.1e}")
    report = tunecompile.report(ours)
    missed = [note for note in report.notes if note.code not in ("providers", "not-cuda")]
    counts = {m.family: f"{m.rewritten}/{m.found}" for m in report.matches if m.found}
    return f"{told[0]:8} {told[1]:18} {report.compiles} graphs  {counts}  {'; '.join(map(str, missed))}"


def main() -> int:
    given = parse_arguments()
    warnings.filterwarnings("ignore")
    print("family, way: mean error of gradients in fp32, in bf16 (eager's), what is found in bf16, notes")
    failed = 0
    for family in given.only:
        for way in given.ways:
            torch.compiler.reset()
            try:
                row = compare(family, way, given.executor, given.device)
            except Exception as error:
                row, failed = f"failed: {summary(error)}", failed + 1
            print(f"{family:14} {way:5} {row}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
