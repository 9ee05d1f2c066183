"""Checkpoints of the user's own around layers without padding, which run them again when the call is over."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support import zoo
from tests.support.batches import padded
from tests.support.models.pairs import pair

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_one_mask_two_forwards_under_checkpoints():
    gradients = []
    for m in pair(lambda: zoo.make("llama", use_cache=False)):
        inner = type(m.train().model)
        m.model.__class__ = type(
            "Checkpointed",
            (inner,),
            {
                "__call__": lambda self, *a, _inner=inner, **k: checkpoint(
                    lambda: _inner.__call__(self, *a, **k), use_reentrant=False
                )
            },
        )
        batch = padded()
        first = m(**batch).loss
        rest = {k: v for k, v in batch.items() if k != "labels"}
        (first + (m(**rest).logits * batch["attention_mask"][..., None]).square().mean()).backward()
        gradients.append(m.model.embed_tokens.weight.grad)
    torch.testing.assert_close(*gradients)
