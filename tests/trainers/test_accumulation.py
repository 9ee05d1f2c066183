"""Batches that a Trainer accumulates and that come as one: the same steps, by losses, gradients and weights."""

import re
from types import SimpleNamespace

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import adapted_layers, attending, small
from tests.support.notes import find, has
from tests.support.trainers import Rows, arguments, collate, curve
from tunecompile.integrations import trainer_batches
from tunecompile.trainers import accumulation

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")


def dataset(count=22):
    """Rows of different lengths: they are padded, differently in each batch, and the last step has fewer."""
    return datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in Rows(count)])


def padded(rows):
    return collate([{"input_ids": torch.tensor(row["input_ids"])} for row in rows])


def trainer(folder, callbacks, model=None, kind=None, data=None, **options):
    options = {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 2, **options}
    args = arguments(transformers.TrainingArguments, folder, eval_strategy="no", **options)
    about = {"model": model or adapted_layers(), "args": args, "callbacks": callbacks, "data_collator": padded}
    return (kind or transformers.Trainer)(train_dataset=data or dataset(), **about)


def merging(**options):
    return tunecompile.Callback(**{"merge_accumulation": True, "executor": "eager", "memory": "1GiB", **options})


def weights(model):
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


class Batches(transformers.TrainerCallback):
    """Rows of each batch that a model was trained on, and its gradients before each step."""

    def __init__(self):
        self.rows, self.gradients = [], []

    def on_train_begin(self, args, state, control, model=None, **_):
        self.model = model
        self.handle = model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module, args, kwargs):
        self.rows.append(len(kwargs["input_ids"]))

    def on_pre_optimizer_step(self, *_, **__):
        self.gradients.append({name: p.grad.clone() for name, p in self.model.named_parameters() if p.requires_grad})


@pytest.mark.parametrize(
    "shuffled, build",
    [("random", lambda: zoo.adapt(attending(), target_modules=["q_proj"])), ("group_by_length", adapted_layers)],
    ids=["random", "by length"],
)
def test_a_step_is_the_same_in_one_batch(tmp_path, shuffled, build):
    """Losses, gradients, weights, steps and epochs are eager's, also of a last step with fewer rows."""
    strategy = {"train_sampling_strategy": shuffled} if shuffled != "random" else {}
    apart, at_once = Batches(), Batches()
    plain = trainer(tmp_path, [apart], build(), **strategy)
    plain.train()
    door = merging()
    ours = trainer(tmp_path, [door, at_once], build(), **strategy)
    ours.train()
    assert apart.rows == [2] * 22 and at_once.rows == [8, 8, 6] * 2
    assert curve(ours) == pytest.approx(curve(plain), rel=1e-4) and len(curve(ours)) == 12
    for mine, theirs in zip(at_once.gradients, apart.gradients, strict=True):
        assert max(zoo.errors(mine, theirs, 1e-3).values()) < 1e-3
    for name, value in weights(ours.model).items():
        torch.testing.assert_close(value, weights(plain.model)[name], rtol=1e-3, atol=1e-4)
    assert ours.state.global_step == plain.state.global_step == 6 and ours.state.epoch == plain.state.epoch
    for mine, theirs in zip(ours.state.log_history, plain.state.log_history, strict=True):
        assert mine["step"] == theirs["step"]
        assert mine["epoch"] == pytest.approx(
            theirs["epoch"], abs=0.1
        )  # counted in batches, of which one has fewer rows
    (told,) = find(door.report().notes, "accumulation-merged")
    assert (told.fields["count"], told.fields["merged"], told.fields["length"]) == (4, 8, 20)


def test_as_many_come_as_one_as_fit(tmp_path, monkeypatch):
    """The largest divisor of the accumulation whose prediction fits."""
    asked = []

    def predicted(model, shape):
        asked.append(shape)
        tokens = shape[0] * shape[1]
        return SimpleNamespace(fits=tokens <= 100, peak=10 * tokens, budget=1000, fitting_tokens=100)

    monkeypatch.setattr(accumulation, "estimate", predicted)
    batches, door = Batches(), merging()
    ours = trainer(tmp_path, [door, batches], max_steps=2)
    assert asked == [(8, 20), (4, 20)] and ours.args.gradient_accumulation_steps == 2
    ours.train()
    assert batches.rows == [4] * 4 and ours.state.global_step == 2
    monkeypatch.setattr(
        accumulation, "estimate", lambda *_: SimpleNamespace(fits=False, peak=9, budget=8, fitting_tokens=0)
    )
    kept = trainer(tmp_path, [door := merging()])
    assert kept.args.gradient_accumulation_steps == 4 and kept.args.per_device_train_batch_size == 2
    (told,) = find(door.report().notes, "accumulation-kept")
    assert told.detail.code == "no-room"


def test_a_run_that_is_resumed_goes_on_where_it_was(tmp_path):
    whole, half, rest = (trainer(tmp_path, [merging()], save_strategy="steps", save_steps=2) for _ in range(3))
    whole.train()
    half.args.max_steps = 2
    half.train()
    batches = Batches()
    rest.add_callback(batches)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert batches.rows == [6, 8, 8, 6]
    for name, value in weights(rest.model).items():
        torch.testing.assert_close(value, weights(whole.model)[name], rtol=1e-3, atol=1e-4)


class OwnLoss(transformers.Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    ("code", "words", "options"),
    [
        ("nothing-accumulated", "is 1", {"gradient_accumulation_steps": 1}),
        ("own-batches", "OwnLoss has its own compute_loss", {"kind": OwnLoss}),
        ("differs-by-batch", "dataloader_drop_last", {"dataloader_drop_last": True}),
        ("differs-by-batch", "label_smoothing_factor", {"label_smoothing_factor": 0.1}),
        ("differs-by-batch", "neftune_noise_alpha", {"neftune_noise_alpha": 5.0}),
        ("rows-unknown", "how long a row", {"data": Rows()}),
        ("room-unknown", "how much memory", {"memory": None}),
    ],
)
def test_what_would_not_be_the_same_is_left_alone(tmp_path, code, words, options):
    door = merging(**{key: options.pop(key) for key in ("memory",) if key in options})
    steps = options.get("gradient_accumulation_steps", 4)
    kept = trainer(tmp_path, [door], **options)
    assert (kept.args.per_device_train_batch_size, kept.args.gradient_accumulation_steps) == (2, steps)
    (told,) = find(door.report().notes, "accumulation-kept")
    assert told.detail.code == code and re.search(words, told)


def test_models_whose_rows_depend_on_each_other_are_left_alone(tmp_path):
    """Router losses are means of a batch, and some rotary embeddings follow its longest row."""
    made = trainer(tmp_path, [])
    assert trainer_batches.why_kept(made) is None
    config = made.model.get_base_model().config
    config.output_router_logits = True
    assert "output_router_logits" in trainer_batches.why_kept(made)
    config.output_router_logits = False
    assert trainer_batches.why_kept(made) is None
    made.args.router_aux_loss_coef = None  # TRL's default: the config's coefficient
    assert "output_router_logits" in trainer_batches.why_kept(made)
    made.args.router_aux_loss_coef = 0.0
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    assert "longest row" in trainer_batches.why_kept(made)
    config.rope_parameters = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    assert "longest row" in trainer_batches.why_kept(made)


def test_several_processes_keep_their_batches(tmp_path, monkeypatch):
    """Each would decide by its own memory."""
    made = trainer(tmp_path, [])
    for name in ("world_size", "n_gpu"):
        with monkeypatch.context() as patch:
            patch.setattr(transformers.TrainingArguments, name, property(lambda _: 2))
            assert trainer_batches.why_kept(made).code == "several-processes"
    made.compute_loss = made.compute_loss  # replaced on the object
    assert trainer_batches.why_kept(made).code == "own-batches"


def test_a_callback_that_comes_late_merges_nothing(tmp_path):
    late = trainer(tmp_path, [], max_steps=1)
    late.add_callback(door := merging())
    late.train()
    (told,) = find(door.report().notes, "accumulation-kept")
    assert told.detail.code == "added-late" and late.args.gradient_accumulation_steps == 4


def test_a_prediction_that_fails_changes_nothing(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no graph")

    monkeypatch.setattr(accumulation, "estimate", fails)
    kept = trainer(tmp_path, [door := merging()])
    assert "RuntimeError: no graph" in find(door.report().notes, "accumulation-kept")[0]
    assert kept.args.gradient_accumulation_steps == 4 and not has(door.report().notes, "accumulation-merged")


@pytest.mark.slow
def test_trls_trainer_takes_rows_at_once(tmp_path):
    """SFTTrainer's loss is Trainer's; a preference is a mean of its batch."""
    trl = pytest.importorskip("trl")
    from tests.support.trainers import tokenizer

    def train(callbacks):
        args = arguments(
            trl.SFTConfig, tmp_path, max_length=24, eval_strategy="no", bf16=False, max_steps=3, pad_token="<pad>"
        )
        about = {"args": args, "train_dataset": dataset(16), "processing_class": tokenizer(), "callbacks": callbacks}
        made = trl.SFTTrainer(zoo.adapt(small()), **about)
        made.train()
        return made

    plain, ours = train([]), train([door := merging(), batches := Batches()])
    assert curve(ours) == pytest.approx(curve(plain), rel=1e-4) and batches.rows == [4] * 3
    assert find(door.report().notes, "accumulation-merged")[0].fields["length"] == 24
    for name in ("dpo", "grpo", "kto", "reward"):
        kind = getattr(trl, f"{name.upper() if name != 'reward' else 'Reward'}Trainer")
        assert trainer_batches._home(kind.__new__(kind), "compute_loss") not in trainer_batches._KNOWN
