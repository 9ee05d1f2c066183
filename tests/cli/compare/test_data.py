"""Bad data is refused by name; good data becomes the batches it should."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tunecompile import errors
from tunecompile.cli.compare import data
from tunecompile.cli.compare.loops import real_tokens
from tunecompile.cli.compare.spec import Job, Shape, parse_shape

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"


@pytest.fixture
def tokenizer():
    words = ["<pad>", "<end>", "<unk>", "<user>", "<assistant>", "a", "b", "c", "d"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", chat_template=TEMPLATE
    )


def write(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize(
    ("rows", "error", "says"),
    [
        ([], errors.EmptyData, "holds no rows"),
        (["{"], errors.BadJson, "line 1"),
        (["[1]"], errors.BadJson, "not an object"),
        ([{"text": "a"}, {"question": "a", "answer": "b"}], errors.WrongColumns, "line 2.*'question', 'answer'"),
        ([{"prompt": "a"}], errors.WrongColumns, "'prompt'"),
        ([{"text": ""}], errors.WrongColumns, "'text'"),
        ([{"messages": []}], errors.BadMessages, "no messages"),
        ([{"messages": [{"role": "user"}]}], errors.BadMessages, "without role or content"),
        (
            [{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}],
            errors.BadMessages,
            "no answer",
        ),
    ],
)
def test_bad_rows_are_refused_with_their_line(tmp_path, rows, error, says):
    with pytest.raises(error, match=says):
        data.read_rows(write(tmp_path, *rows))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(errors.DataNotFound, match="absent.jsonl"):
        data.read_rows(str(tmp_path / "absent.jsonl"))


def test_long_rows_are_an_error_or_dropped(tokenizer, tmp_path):
    rows = data.read_rows(write(tmp_path, {"text": "a b"}, {"text": "a b c d a b c d"}, {"text": "c d"}))
    job = Job(system="hf", model="m", data="rows.jsonl", seq_len=4, batch=2)
    with pytest.raises(errors.RowsTooLong, match="1 of 3 .* 9 tokens, row 2"):
        data.split_rows(rows, tokenizer, job)
    split = data.split_rows(rows, tokenizer, job.replace(too_long="drop"))
    assert len(split.train) == 2 and split.dropped == 1
    with pytest.raises(errors.TooFewRows, match="raise --seq-len"):
        data.split_rows(rows, tokenizer, job.replace(too_long="drop", batch=3))


def test_messages_need_a_chat_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(errors.NoChatTemplate, match="my/model"):
        data.tokenise(data.check_row(chat("a", "b"), "f", 1), tokenizer, "my/model")


def test_the_loss_is_on_the_answer_and_its_end(tokenizer):
    example = data.tokenise(data.check_row(chat("a", "b c"), "f", 1), tokenizer, "m")
    learned = [i for i, label in zip(example.input_ids, example.labels) if label != data.IGNORED]
    assert tokenizer.convert_ids_to_tokens(learned) == ["b", "c", "<end>"]
    assert data.tokenise({"prompt": "a ", "completion": "b"}, tokenizer, "m").labels == [data.IGNORED, 6, 1]
    assert data.tokenise({"text": "a b"}, tokenizer, "m").labels == [5, 6, 1]


def test_padding_goes_by_length_even_where_pad_is_eos():
    examples = [data.ChatExample([5, 1], [5, 1]), data.ChatExample([5, 6, 1], [data.IGNORED, 6, 1])]
    batch = data.collate(examples, pad_id=1, multiple=4)
    assert batch["input_ids"].tolist() == [[5, 1, 1, 1], [5, 6, 1, 1]]
    assert batch["labels"].tolist() == [[5, 1, -100, -100], [-100, 6, 1, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]


def test_the_padding_token_is_moved_off_the_end_token(tokenizer):
    tokenizer.pad_token = "<end>"
    assert data.prepare_tokenizer(tokenizer).pad_token == "<pad>"


def test_held_out_rows_are_never_trained_on_and_the_order_is_fixed(tokenizer):
    rows = [{"text": f"{a} {b}"} for a in "abcd" for b in "abcd"]
    job = Job(system="hf", model="m", held_out=4, batch=4, seq_len=8)
    split, again = (data.split_rows(rows, tokenizer, job) for _ in range(2))
    assert split == again and len(split.held_out) == 4
    assert not [row for row in split.held_out if row in split.train]
    assert data.split_rows(rows, tokenizer, job.replace(seed=1)).train != split.train


def test_batches_go_round_again_and_random_ones_have_no_special_tokens(tokenizer):
    rows = [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    batches = data.make_batches(rows, tokenizer, Job(system="hf", model="m", batch=2, pad_to=2), 3)
    assert [batch["input_ids"][:, 0].tolist() for batch in batches] == [[5, 6], [7, 5], [6, 7]]
    first, second = data.random_batches(Shape(2, 8), 1000, Job(system="hf", model="m"), seed=0, count=2)
    assert first["input_ids"].min() >= 3 and not torch.equal(first["input_ids"], second["input_ids"])


def test_padded_batches_have_real_lengths_and_the_same_rows_for_all():
    shape = parse_shape("padded-64x128")
    padded, flat = (
        data.random_batches(shape, 1000, Job(system=name, model="m", pad_to=64), seed=0, count=1)[0]
        for name in ("hf", "unsloth-padding-free")
    )
    mask = padded["attention_mask"].bool()
    lengths = mask.sum(1)
    assert (
        padded["input_ids"].shape == (64, 128)
        and lengths.min() >= 45
        and lengths.max() <= 128
        and 60 < lengths.float().mean() < 100
    )
    assert (padded["labels"][~mask] == data.IGNORED).all() and (padded["labels"] == padded["input_ids"])[mask].all()
    assert torch.equal(flat["input_ids"][0], padded["input_ids"][mask]) and torch.equal(
        flat["packed_seq_lengths"], lengths.int()
    )
    assert (flat["labels"][0][flat["position_ids"][0] == 0] == data.IGNORED).all()
    assert (flat["labels"] != data.IGNORED).sum() == (padded["labels"][:, 1:] != data.IGNORED).sum()
    assert real_tokens(flat) == real_tokens(padded) == lengths.sum()


def test_another_repetition_has_the_same_held_out_rows_in_another_order_of_training(tokenizer):
    rows = [{"text": f"{a} {b}"} for a in "abcd" for b in "abcd"]
    job = Job(system="hf", model="m", held_out=4, batch=4, seq_len=8)
    first, second = (data.split_rows(rows, tokenizer, job.replace(repeat=repeat)) for repeat in range(2))
    assert first.held_out == second.held_out and first.train != second.train
    assert sorted(map(str, first.train)) == sorted(map(str, second.train))


def test_packed_rows_begin_anew_at_every_border(tokenizer):
    rows = [{"prompt": "a ", "completion": "b c"}, {"text": "d d"}, {"text": "c"}]
    job = Job(system="hf", model="m", batch=3, batching="packed")
    (batch,) = data.make_batches(rows, tokenizer, job, 1)
    a, b, c, d, end = (tokenizer.convert_tokens_to_ids(word) for word in ("a", "b", "c", "d", "<end>"))
    assert batch["input_ids"].tolist() == [[a, b, c, end, d, d, end, c, end]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]
    assert batch["labels"].tolist() == [[-100, b, c, end, -100, d, end, -100, end]] and batch.keys() == {
        "input_ids",
        "labels",
        "position_ids",
    }
    assert "packed_seq_lengths" in data.make_batches(rows, tokenizer, job.replace(system="unsloth"), 1)[0]


def test_pairs_are_text_or_messages_with_the_chosen_answers_first(tokenizer, tmp_path):
    said = [{"role": "assistant", "content": "b"}]
    rows = [
        {"prompt": "a ", "chosen": "b", "rejected": "c d"},
        {"prompt": [{"role": "user", "content": "a"}], "chosen": said, "rejected": said},
    ]
    assert data.read_rows(write(tmp_path, *rows), "dpo") == rows
    batch = data.collate_rows(
        data.read_rows(write(tmp_path, rows[0], rows[0] | {"chosen": "d"}), "dpo"),
        tokenizer,
        Job(system="hf", model="m", pad_to=4),
    )
    answers = [[token for token in row if token >= 0] for row in batch["labels"].tolist()]
    assert [tokenizer.convert_ids_to_tokens(answer) for answer in answers] == [
        ["b", "<end>"],
        ["d", "<end>"],
        ["c", "d", "<end>"],
        ["c", "d", "<end>"],
    ]
    assert len(data.examples_of(rows[1], tokenizer, "m")) == 2
    job = Job(system="hf", model="m", loss="dpo", seq_len=3, batch=1)
    with pytest.raises(errors.RowsTooLong, match="1 of 1 .* 4 tokens"):  # the longer of the two counts
        data.split_rows([rows[0]], tokenizer, job)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "chosen": "b"},
        {"prompt": "a", "chosen": "b", "rejected": ""},
        {"prompt": "a", "chosen": "b", "rejected": []},
    ],
)
def test_half_a_pair_is_refused(tmp_path, row):
    with pytest.raises(errors.WrongPair, match="line 2.*'prompt', 'chosen'"):
        data.read_rows(write(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"}, row), "dpo")
