"""While masks are recorded: of which batches, and which numbers reach a GPU without a wait."""

import math

import pytest
import torch

from tunecompile.runtime.unpad.masks import recorder as recording


class OnGpu(torch.Tensor):
    """As far as it is asked."""

    is_cuda = True


@pytest.mark.parametrize(
    "written_out, cuda, length, records",
    [
        (True, True, 64, True),
        (False, True, 64, False),
        (True, False, 64, False),
        (False, False, 8192, True),
        (False, False, 5793, True),  # 2^25 pairs
        (False, False, 5792, False),
    ],
)
def test_small_masks_are_watched_where_attention_is_written_out(written_out, cuda, length, records):
    ids = torch.zeros(1, length, device="meta", dtype=torch.long).as_subclass(OnGpu if cuda else torch.Tensor)
    recorder = recording.recorder_for([ids], written_out=written_out)
    assert (recorder is not None) is records
    assert recorder is None or recorder.pairs == (math.inf if length == 64 else length**2)


@pytest.mark.parametrize(
    "args, kwargs, expected",
    [
        ((1.0,), {"device": "cuda"}, True),
        ((1,), {"device": torch.device("cuda", 0), "dtype": torch.float32}, True),
        ((True,), {"device": "cuda:0"}, True),
        ((1.0,), {}, False),
        ((1.0,), {"device": "cpu"}, False),
        ((1.0,), {"device": "cuda", "requires_grad": True}, False),
        ((1.0,), {"device": "cuda", "pin_memory": False}, False),
        (([1.0],), {"device": "cuda"}, False),
        ((1.0, torch.float32), {"device": "cuda"}, False),
        ((1e300,), {"device": "cuda"}, False),
    ],
)
def test_one_number_for_a_gpu_is_filled_in(args, kwargs, expected):
    """`full` takes no other arguments, and would drop a gradient."""
    assert recording._is_number_for_gpu(args, kwargs) is expected


ONES = torch.ones(2, 6, dtype=torch.long)


@pytest.mark.parametrize(
    "asks",
    [
        lambda mask: mask.bool().all(),
        lambda mask: torch.all(mask == 1),
        lambda mask: mask[:, -6:].to(torch.bool).sum() == mask.numel(),
    ],
)
def test_a_mask_of_ones_is_taken_for_one_with_padding(asks):
    recorder = recording.recorder_for([ONES], padding=ONES)
    recorder.begin()
    assert not asks(ONES) and asks(torch.ones(2, 6, dtype=torch.long))
    recorder.end()
    assert asks(ONES)


def test_other_questions_are_answered():
    recorder = recording.recorder_for([ONES], padding=ONES)
    recorder.begin()
    try:
        counts, one = ONES.sum(-1), ONES[:, :1].all()
        assert counts.tolist() == [6, 6] and one and ONES.all(-1).all() and ONES.sum() == torch.tensor(12)
        assert not (ONES.sum() == 11) and (ONES.float().mean() == 1)
    finally:
        recorder.end()
