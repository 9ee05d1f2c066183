"""Several threads that generate with one model: each has the tokens that it would have alone."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.runtime.rollouts.calls import greedy, pair, prompts

pytestmark = pytest.mark.filterwarnings("ignore")


def test_threads_take_turns():
    """A layer's number is hidden while a step runs it, and the other thread would find it hidden."""
    model, ours, loop = pair(initializer_range=0.2)
    expected = model.generate(**prompts(), **greedy())
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(lambda _: ours.generate(**prompts(), **greedy()), range(6)))
    finally:
        sys.setswitchinterval(before)
    assert all(torch.equal(each, expected) for each in found) and loop.calls == 6
    assert [layer.self_attn.layer_idx for layer in ours.model.layers] == [0, 1, 2]
