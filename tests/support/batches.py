"""Batches with padding, and batches of packed sequences."""

from __future__ import annotations

import torch

from tests.support import zoo
from tunecompile.runtime.unpad.documents import read_padding
from tunecompile.runtime.unpad.flat_batch import FlatBatch


def padded(
    rows: int = 4, length: int = 20, side: str = "right", seed: int = 0, device: str = "cpu", vocabulary: int = 256
) -> dict:
    """Rows of random lengths, one of them full and one of a single token, without labels where a loss would read padding."""
    batch = zoo.batch(vocabulary, rows, length, seed=seed)
    lengths = torch.randint(2, length, (rows,), generator=torch.Generator().manual_seed(seed))
    lengths[0], lengths[-1] = length, 1
    place = torch.arange(length)
    mask = place < lengths[:, None] if side == "right" else place >= length - lengths[:, None]
    labels = batch["input_ids"].where(mask, -100)
    labels[torch.arange(rows), 0 if side == "right" else length - lengths] = -100
    return {key: value.to(device) for key, value in {**batch, "attention_mask": mask.long(), "labels": labels}.items()}


def lengths_mask(*lengths: int, length: int = 6) -> torch.Tensor:
    """1 at the tokens of rows of these lengths, 0 at the padding behind them."""
    return (torch.arange(length) < torch.tensor(lengths)[:, None]).long()


def dropping(*lengths: int, length: int) -> FlatBatch:
    """A batch whose rows have these lengths, without its padding."""
    return FlatBatch.of(read_padding(lengths_mask(*lengths, length=length), None).documents)


def packed(*rows: tuple[int, ...], seed: int = 0, vocabulary: int = 256) -> dict:
    """Rows of sequences of these lengths. No loss crosses from one to the next."""
    lengths = [sum(row) for row in rows]
    assert len(set(lengths)) == 1
    batch = zoo.batch(vocabulary, len(rows), lengths[0], seed=seed)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    return {
        "input_ids": batch["input_ids"],
        "labels": batch["input_ids"].masked_fill(positions == 0, -100),
        "position_ids": positions,
    }


def documents(*lengths: int) -> tuple[dict, dict]:
    """A packed row of documents with their bounds, and a batch with a row for each of them."""
    row, longest = packed(lengths), max(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    bounds = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    pad = torch.nn.utils.rnn.pad_sequence
    rows = {
        "input_ids": pad(row["input_ids"][0].split(lengths), batch_first=True),
        "labels": pad(row["labels"][0].split(lengths), batch_first=True, padding_value=-100),
        "attention_mask": lengths_mask(*lengths, length=longest),
    }
    return {**row, **bounds, "use_cache": False}, rows


def branches(prefix=40, length=56, rows=3, seed=0, side="", more=()) -> dict:
    """Rows with a common prefix. side: of padding; "none" for a mask of ones, "" for no mask. more: (rows, tokens) that have a longer one in common."""
    batch = zoo.batch(seed=seed, rows=rows, length=length)
    ids = batch["input_ids"]
    ids[:, :prefix] = ids[0, :prefix]
    for last, tokens in more:
        ids[:last, :tokens] = ids[0, :tokens]
    batch["labels"] = ids.clone()
    if not side:
        return batch
    if side == "none":
        return {**batch, "attention_mask": torch.ones_like(ids)}
    mask = lengths_mask(*range(length, length - rows, -1), length=length)
    if side == "left":  # of the prompt, which is padded alike in all rows
        mask = torch.ones_like(mask)
        mask[:, :4] = 0
    batch["labels"][mask == 0] = -100
    batch["labels"][:, 4] = -100
    return {**batch, "attention_mask": mask}
