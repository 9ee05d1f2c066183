"""Gradients of every family of transformers beside eager's, against fp32: adapters over a frozen base, in bf16 and under autocast.

    python benchmarks/steps/families.py --out benchmarks/results/families.json
    python benchmarks/steps/families.py --families llama,gemma3 --out /tmp/two.json

Two layers of each family, random weights and tokens, one verified step (`tunecompile.verify`), several processes at a time. From the repository's root:
families are those of its tests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

import tunecompile
from tests.support import zoo
from tunecompile.cli.compare.machine import header

SIZES = dict(
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=2048,
    max_position_embeddings=1024,
)
FOLLOWING = {
    "head_dim": 64,
    "ffn_dim": 1024,
    "word_embed_proj_dim": 512,
    "moe_intermediate_size": 256,
}  #: of families that have these
ROWS, LENGTH = 4, 256
PRECISIONS = ("bf16", "autocast")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--families", type=lambda text: text.split(","), default=list(zoo.NAMES), help="all, if not given"
    )
    parser.add_argument(
        "--processes", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)), help="at a time; 1: in this one"
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def verified(family: str, precision: str, device: str) -> dict[str, Any]:
    """One family in one precision: its row."""
    torch._dynamo.reset()
    _, settings = zoo.NAMES[family]
    model = zoo.make(family, **SIZES, **{name: size for name, size in FOLLOWING.items() if name in settings})
    model = zoo.adapt(
        model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32), r=16, lora_alpha=16
    ).train()
    tunecompile.optimize(model, executor="inductor" if device == "cuda" else "eager")
    with torch.autocast(device, torch.bfloat16) if precision == "autocast" else contextlib.nullcontext():
        found = tunecompile.verify(model, zoo.batch(SIZES["vocab_size"], ROWS, LENGTH, device))
    matches = {m.family: [m.found, m.rewritten] for m in tunecompile.report(model).matches if m.found}
    own, eagers = (median(row[key] for row in found.gradients) for key in ("error", "eager_error"))
    return {
        "status": "ok",
        "passed": found.passed,
        "matches": matches,
        "error": own,
        "eager_error": eagers,
        "worst": max(row["error"] / row["yardstick"] for row in found.gradients),
        "losses": found.losses,
        "notes": found.notes,
        "failed": [f"{verdict.name}: {verdict.detail}" for verdict in found.verdicts if not verdict.passed],
    }


def said(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return row["reason"].splitlines()[0]
    return f"{row['error']:.4f}, eager's {row['eager_error']:.4f}, worst {row['worst']:.2f} of eager's{'' if row['passed'] else ': FAILED ' + '; '.join(row['failed'])}"


def pool(processes: int) -> Executor:
    return (
        ThreadPoolExecutor(1)
        if processes == 1
        else ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    )


def main() -> int:
    given = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given.out.parent.mkdir(parents=True, exist_ok=True)
    cases = [(family, precision) for family in given.families for precision in PRECISIONS]
    about = {**header(), "device": device, "shape": f"{ROWS}x{LENGTH}"}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    with pool(given.processes) as workers:
        running = {workers.submit(verified, *case, device): case for case in cases}
        for done in as_completed(running):
            case = running[done]
            try:
                row = done.result()
            except Exception as error:  # a family that this version of transformers has not, say: the others go on
                row = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
            rows[case] = {"family": case[0], "precision": case[1], **row}
            result = {**about, "runs": [rows[case] for case in cases if case in rows]}
            given.out.write_text(json.dumps(result, indent=1) + "\n")
            print(f"{case[0]:12s}{case[1]:10s}{said(row)}", flush=True)
    return 0 if all(row.get("passed") for row in rows.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
