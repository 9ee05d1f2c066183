"""From JSON Lines to the same batches for every system: read, check, split, tokenise, pad or pack.

There are three kinds of row: `messages` (chat), `prompt` with `completion`, and `text`. The loss covers the last
assistant message, the completion, or all of the text. For DPO a row has `prompt`, `chosen` and `rejected`.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tunecompile.cli.compare.spec import Job, Shape, system
from tunecompile.errors import (
    BadJson,
    BadMessages,
    DataNotFound,
    EmptyData,
    NoChatTemplate,
    RowsTooLong,
    TooFewRows,
    WrongColumns,
    WrongPair,
)

IGNORED = -100


@dataclass(frozen=True)
class ChatExample:
    """One tokenised row. Labels are the ids where the loss counts, and IGNORED elsewhere."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Split:
    """Rows in the trainer's format and in training order.

    A row has `prompt` and `completion`, or `text`, or `prompt`, `chosen` and `rejected`.
    """

    train: list[dict]
    held_out: list[dict]
    dropped: int = 0


def read_rows(path: str, loss: str = "sft") -> list[dict]:
    """Read and check all rows, so that a mistake in the last line is found before a model is loaded."""
    if not Path(path).is_file():
        raise DataNotFound(path=path)
    rows, check = [], check_pair if loss == "dpo" else check_row
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(check(parse_line(line, path, number), path, number))
    if not rows:
        raise EmptyData(path=path)
    return rows


def digest(path: str) -> str:
    """SHA-256 of the file, which identifies the rows of a result."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def parse_line(line: str, path: str, number: int) -> dict:
    """The object on a line. Raises `BadJson`."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadJson(path=path, line=number, reason=error.msg) from None
    if not isinstance(row, dict):
        raise BadJson(path=path, line=number, reason=f"a {type(row).__name__}, not an object")
    return row


def check_row(row: dict, path: str, number: int) -> dict:
    """The row as prompt and completion (both text or both messages), or as text. Raises BadMessages, WrongColumns."""
    if "messages" in row:
        messages = row["messages"]
        if not is_chat(messages):
            reason = "a message without role or content" if messages else "no messages"
            raise BadMessages(path=path, line=number, reason=reason)
        if messages[-1]["role"] != "assistant" or len(messages) < 2:
            raise BadMessages(path=path, line=number, reason="there is no answer to learn")
        plain = [{"role": m["role"], "content": m["content"]} for m in messages]
        return {"prompt": plain[:-1], "completion": plain[-1:]}
    for columns in (("prompt", "completion"), ("text",)):
        if all(isinstance(row.get(column), str) and row[column] for column in columns):
            return {column: row[column] for column in columns}
    raise WrongColumns(path=path, line=number, found=", ".join(map(repr, row)) or "none")


def check_pair(row: dict, path: str, number: int) -> dict:
    """The row as a prompt and its two answers, all of them text or all of them messages. Raises `WrongPair`."""
    pair = {column: row.get(column) for column in ("prompt", "chosen", "rejected")}
    if not (all(isinstance(part, str) and part for part in pair.values()) or all(map(is_chat, pair.values()))):
        raise WrongPair(path=path, line=number, found=", ".join(map(repr, row)) or "none")
    return pair


def is_chat(messages: Any) -> bool:
    """Whether this is a list of messages with role and content."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)
    )


def split_rows(rows: list[dict], tokenizer, job: Job) -> Split:
    """Drop rows that are too long, shuffle the others by seed, and hold out the same rows in every repetition.

    Raises:
        RowsTooLong: rows are too long, and `too_long` is "error".
        TooFewRows: no batch is left.
    """
    lengths = [max(len(example.input_ids) for example in examples_of(row, tokenizer, job.model)) for row in rows]
    longest = max(lengths)
    if longest > job.seq_len and job.too_long == "error":
        counts = {"count": sum(length > job.seq_len for length in lengths), "total": len(rows)}
        raise RowsTooLong(**counts, limit=job.seq_len, longest=longest, row=lengths.index(longest) + 1)
    kept = [row for row, length in zip(rows, lengths) if length <= job.seq_len]
    random.Random(job.seed).shuffle(kept)
    held_out = kept[: job.held_out]
    train = kept[job.held_out :]
    if job.repeat:
        random.Random(job.draw).shuffle(train)
    # a small file is repeated, as in epochs; it has to fill one batch
    if len(train) < job.batch:
        mend = "Lower --batch or --held-out, or add rows."
        if len(kept) < len(rows):
            mend = "Lower --batch, or raise --seq-len: rows were too long."
        needs = {"batch": job.batch, "held_out": job.held_out, "needed": job.batch + job.held_out}
        raise TooFewRows(path=job.data, rows=len(kept), mend=mend, **needs)
    return Split(train, held_out, dropped=len(rows) - len(kept))


def render_prompt(prompt, tokenizer, model: str) -> list[int]:
    """The ids of a prompt, up to where the answer begins."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if not tokenizer.chat_template:
        raise NoChatTemplate(model=model)
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]


def tokenise(row: dict, tokenizer, model: str) -> ChatExample:
    """The ids and labels of a row. The answer begins where the ids of the prompt and of the whole row diverge."""
    if "text" in row:
        ids = end_with_eos(tokenizer(row["text"])["input_ids"], tokenizer)
        return ChatExample(ids, list(ids))
    prompt_ids = render_prompt(row["prompt"], tokenizer, model)
    if isinstance(row["prompt"], str):
        ids = end_with_eos(tokenizer(row["prompt"] + row["completion"])["input_ids"], tokenizer)
    else:
        ids = tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=True)["input_ids"]
    start = 0
    while start < min(len(prompt_ids), len(ids)) and prompt_ids[start] == ids[start]:
        start += 1
    return ChatExample(ids, [IGNORED] * start + ids[start:])


def examples_of(row: dict, tokenizer, model: str) -> list[ChatExample]:
    """The sequences of a row: one, or two for DPO, the prompt with the chosen answer and with the rejected one."""
    if "chosen" not in row:
        return [tokenise(row, tokenizer, model)]
    return [
        tokenise({"prompt": row["prompt"], "completion": row[answer]}, tokenizer, model)
        for answer in ("chosen", "rejected")
    ]


def collate_rows(rows: list[dict], tokenizer, job: Job) -> dict[str, torch.Tensor]:
    """A padded batch. For DPO, the rows with chosen answers precede those with rejected answers."""
    columns = zip(*(examples_of(row, tokenizer, job.model) for row in rows))
    return collate([example for column in columns for example in column], tokenizer.pad_token_id, job.pad_to)


def end_with_eos(ids: list[int], tokenizer) -> list[int]:
    """The ids with EOS at their end, so that the model learns to end an answer."""
    return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def collate(examples: list[ChatExample], pad_id: int, multiple: int) -> dict[str, torch.Tensor]:
    """Right-pad to one length. The mask follows from the lengths, not from the ids, as pad may equal EOS."""
    length = -(-max(len(e.input_ids) for e in examples) // multiple) * multiple
    ids = torch.full((len(examples), length), pad_id)
    labels = torch.full((len(examples), length), IGNORED)
    mask = torch.zeros((len(examples), length), dtype=torch.long)
    for row, example in enumerate(examples):
        count = len(example.input_ids)
        ids[row, :count] = torch.tensor(example.input_ids)
        labels[row, :count] = torch.tensor(example.labels)
        mask[row, :count] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def held_out_batches(rows: list[dict], tokenizer, job: Job) -> list[dict[str, torch.Tensor]]:
    """Batches with every row once, padded; the last batch may be smaller."""
    parts = [rows[start : start + job.batch] for start in range(0, len(rows), job.batch)]
    return [collate_rows(part, tokenizer, job) for part in parts]


def make_batches(rows: list[dict], tokenizer, job: Job, count: int) -> list[dict[str, torch.Tensor]]:
    """`count` batches in order. Rows are repeated if there are too few."""
    picked = [[rows[(number * job.batch + i) % len(rows)] for i in range(job.batch)] for number in range(count)]
    batches = [collate_rows(part, tokenizer, job) for part in picked]
    return [pack(batch, job) for batch in batches] if job.batching == "packed" else batches


#: quantiles of a row's tokens, of the 4,000 rows of benchmarks/data/wordnet.jsonl (questions about words, 45 to 121
#: tokens) and of the documentation of Python's standard library as questions and answers (48 to 681 tokens), with the
#: tokenizer and chat template of SmolLM2-135M-Instruct
QUANTILES = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 0.995, 1)
LENGTHS = (45, 50, 52, 56, 61, 66, 70, 75, 80, 90, 121, 161, 223, 309, 372, 681)


def random_batches(shape: Shape, vocabulary: int, job: Job, seed: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Batches of random tokens for shape models, the same for every system, with labels on all tokens."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(3, vocabulary - 256, (shape.rows, shape.length), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        batches.append(cut(ids, row_lengths(shape, generator), job.pad_to) if shape.padded else batch)
    packed = shape.padded and (job.batching == "packed" or system(job.system).padding_free)
    return [pack(batch, job) for batch in batches] if packed else batches


def row_lengths(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Random lengths of rows, int64 [rows], by the quantiles of real rows (linear in between), limited by the shape."""
    quantiles, tokens = torch.tensor([QUANTILES, LENGTHS], dtype=torch.float64)
    drawn = torch.rand(shape.rows, generator=generator, dtype=torch.float64)
    right = torch.searchsorted(quantiles, drawn).clamp(1, len(LENGTHS) - 1)
    share = (drawn - quantiles[right - 1]) / (quantiles[right] - quantiles[right - 1])
    return torch.lerp(tokens[right - 1], tokens[right], share).long().clamp(max=shape.length)


def cut(ids: torch.Tensor, lengths: torch.Tensor, multiple: int) -> dict[str, torch.Tensor]:
    """Rows cut to the given lengths, padded to the longest."""
    return collate([ChatExample(row[:n], row[:n]) for row, n in zip(ids.tolist(), lengths.tolist())], 0, multiple)


def pack(batch: dict[str, torch.Tensor], job: Job) -> dict[str, torch.Tensor]:
    """A padded batch as one row without padding, as padding-free collators make it.

    Positions begin anew with every sequence, and so does attention, which transformers derives from positions if there
    is no mask. A sequence's first token is no label. Unsloth reads `packed_seq_lengths` (int32 [rows]).
    """
    mask = batch["attention_mask"].bool()
    positions = torch.arange(mask.shape[1]).expand_as(mask)[mask]
    labels = batch["labels"][mask].masked_fill(positions == 0, IGNORED)
    packed = {"input_ids": batch["input_ids"][mask][None], "labels": labels[None], "position_ids": positions[None]}
    lengths = {"packed_seq_lengths": mask.sum(1).to(torch.int32)}
    return packed | (lengths if job.engine == "unsloth" else {})


def prepare_tokenizer(tokenizer):
    """Give padding its own id if it is EOS: many collators mask by id, and would also mask the end of an answer."""
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        spare = [
            t
            for t in ("<|endoftext|>", "<pad>", "<|pad|>", "<|finetune_right_pad_id|>", tokenizer.unk_token)
            if t and tokenizer.convert_tokens_to_ids(t) not in (None, tokenizer.eos_token_id, tokenizer.unk_token_id)
        ]
        spare += [tokenizer.unk_token] if tokenizer.unk_token not in (None, tokenizer.eos_token) else []
        tokenizer.pad_token = spare[0] if spare else tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer
