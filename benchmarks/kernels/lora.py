"""Small pieces beside or below a large matrix: bytes are one read and one write of the piece (beside X: of the room's width)."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._harness import DEVICE, INDUCTOR, TEMPLATE, compiled, main, randn, relative_error
from tunecompile.templates import lora

RANK = 16


@compiled
def reference_rows(source, out):
    out[out.shape[0] - source.shape[0] :].copy_(source)
    return out


@compiled
def reference_columns(source, out):
    room = out[:, out.shape[1] - 64 :]
    room.copy_(torch.nn.functional.pad(source, (0, 64 - source.shape[1])))
    return out


def rows(source, out):
    lora.append_rows(source, out, out.shape[0] - source.shape[0])
    return out


def columns(source, out):
    lora.append_columns(source, out, out.shape[1] - 64)
    return out


def run(bench):
    tokens, k = bench.size(8192), bench.size(4096)

    def below(seed):
        return randn(RANK, k, seed=seed), torch.ones(k + RANK, k, device=DEVICE, dtype=torch.bfloat16)

    def beside(seed):
        return randn(tokens, RANK, seed=seed), torch.ones(tokens, k + 64, device=DEVICE, dtype=torch.bfloat16)

    bench(
        f"{RANK} rows of {k}",
        {INDUCTOR: reference_rows, TEMPLATE: rows},
        below,
        bytes=4 * RANK * k,
        check=relative_error,
        shown="LoRA's A below W",
    )
    bench(
        f"{RANK} columns of {tokens}",
        {INDUCTOR: reference_columns, TEMPLATE: columns},
        beside,
        bytes=2 * tokens * (RANK + 64),
        check=relative_error,
        shown="XA beside X",
    )


if __name__ == "__main__":
    main({"lora": run})
