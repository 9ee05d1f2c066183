"""Rows that begin with the same image, or with the same embeddings, are branches of one prefix."""

import pytest
import torch

from tests.support import zoo
from tests.support.batches import branches
from tests.support.compare import assert_close
from tests.support.models import images
from tests.support.models.pairs import attending, pair
from tests.support.notes import has
from tests.support.reports import shared

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
PREFIX, LENGTH, ROWS = 44, 56, 3


def with_images(same: bool, seed=0) -> dict:
    """Rows of a common prefix that holds an image each."""
    batch = branches(PREFIX, LENGTH, ROWS, seed, "none")
    ids, generator = batch["input_ids"] % 200 + 3, torch.Generator().manual_seed(seed)
    ids[:, 2:8] = torch.tensor([252, *[images.IMAGE] * 4, 253])
    pixels = torch.randn(16, 96, generator=generator, dtype=torch.float64).repeat(ROWS, 1)
    pixels[:16] += not same
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids > 200, -100),
        "attention_mask": batch["attention_mask"],
        "mm_token_type_ids": (ids == images.IMAGE).int(),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
    }


def model():
    made = images.attending(images.adapted(images.qwen2_5_vl, "q_proj", "qkv")[0].double())
    made.enable_input_require_grads()
    made.gradient_checkpointing_enable({"use_reentrant": False})
    return made


def test_an_image_counts_once_and_other_pixels_are_another_prefix():
    """Also under checkpoints, whose hook has embeddings require a gradient. Of three rows two have the same image then."""
    ours, plain = pair(model)
    computed = {True: PREFIX + ROWS * (LENGTH - PREFIX), False: ROWS * LENGTH - PREFIX}
    for count, same in enumerate((True, True, False, False)):
        before = shared(ours)[1]
        assert_close(zoo.step(ours, with_images(same, count % 2)), zoo.step(plain, with_images(same, count % 2)))
        assert shared(ours) == (count + 1, before + computed[same], (count + 1) * ROWS * LENGTH)


@pytest.mark.parametrize("trained", [False, True])
def test_embeddings_in_place_of_ids(trained):
    """Their gradients are of each row: the sum of copies is nobody's."""
    ours, plain = pair(lambda: attending().double())
    found = []
    for each in (ours, plain):
        batch = branches(side="none")
        embedded = each.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_(trained)
        found.append((zoo.step(each, {**batch, "inputs_embeds": embedded}), embedded.grad))
    assert_close(found[0][0], found[1][0])
    assert bool(shared(ours)[0]) is not trained and has(ours, "prefixes-unread") is trained
    if trained:
        torch.testing.assert_close(found[0][1], found[1][1])
