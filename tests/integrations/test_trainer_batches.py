"""What is read of the settings of the trainer under way, and that real trainers have them."""

import types

import pytest

from tunecompile.integrations.trainer_batches import largest_batch


class Trainer:
    def __init__(self, **settings):
        self.args = types.SimpleNamespace(**settings)

    def train(self, rows):
        return largest_batch(rows)


@pytest.mark.parametrize(
    "settings, rows, tokens",
    [
        ({"per_device_train_batch_size": 2, "max_length": 1024}, 2, 2048),
        ({"per_device_train_batch_size": 2, "max_length": 1024}, 4, 4096),  # pairs
        ({"per_device_train_batch_size": 8, "max_length": 512}, 1, 4096),  # one row of documents
        ({"per_device_train_batch_size": 2, "max_length": None, "max_seq_length": 100}, 2, 200),
        ({"per_device_train_batch_size": 8, "max_prompt_length": None, "max_completion_length": 256}, 8, 2048),
        ({"per_device_train_batch_size": 8}, 8, 0),
        ({"max_length": 100}, 8, 0),
    ],
)
def test_rows_and_their_longest_length(settings, rows, tokens):
    assert Trainer(**settings).train(rows) == tokens


def test_without_a_trainer_nothing_is_known():
    assert largest_batch(8) == 0


def test_real_settings_say_so(tmp_path):
    trl = pytest.importorskip("trl")
    settings = trl.SFTConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=3, max_length=77, use_cpu=True, bf16=False
    )
    trainer = Trainer()
    trainer.args = settings
    assert trainer.train(2) == 3 * 77
