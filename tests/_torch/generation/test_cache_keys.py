"""Equal graphs have equal keys, and others have not."""

import pytest
import torch
from torch._inductor import codecache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tunecompile._torch.generation.cache_keys import ALIGNMENT, keys_without_storages


@pytest.fixture
def given():
    """(Fake tensor of two sizes that are symbols, its mode)."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    return mode.from_tensor(torch.empty(3, 5, 8), symbolic_context=sizes), mode


def key(value: torch.Tensor) -> str:
    """As of a weight or a saved tensor, on a GPU."""
    value._is_inductor_static = True
    return str(codecache.extract_tensor_metadata_for_cache_key(value))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether keys are the same. Torch's own would not be."""
    assert key(one) != key(other)
    with keys_without_storages():
        made = key(one), key(other)
    assert key(one) != key(other)
    return made[0] == made[1]


def test_a_storage_has_one_key_however_it_was_made(given):
    like, mode = given
    with mode:
        rows, length, width = like.shape
        made = torch.empty(rows, length, width)
        by_strides = torch.empty_strided(made.shape, made.stride())
    assert str(made.untyped_storage().nbytes()) != str(by_strides.untyped_storage().nbytes())
    assert same(made, by_strides)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.complex128])
def test_a_weight_has_one_key_wherever_it_lies(dtype):
    with FakeTensorMode():
        moved = torch.empty(3, 64, dtype=dtype)[1:2]
        alone = torch.empty(1, 64, dtype=dtype)
        assert same(moved, alone)


def test_how_a_tensor_is_aligned_is_in_its_key(given):
    with FakeTensorMode():
        rows = torch.empty(64)
        for begin in range(1, ALIGNMENT // 4):
            assert not same(rows[begin : begin + 8], rows[:8])
        assert same(rows[ALIGNMENT // 4 :][:8], rows[:8])
    like, mode = given
    with mode:
        rows, _, width = like.shape
        assert not same(torch.empty(rows + 1, width)[rows], torch.empty(3, width)[0])


def test_other_sizes_and_strides_have_other_keys(given):
    like, mode = given
    with mode:
        rows, length, width = like.shape
        plain = torch.empty(rows, length, width)
        assert not same(plain, torch.empty(rows, length + 1, width)[:, :length])
        assert not same(torch.empty(4, 8), torch.empty(5, 8))
        assert not same(torch.empty(4, 8), torch.empty(4, 8, dtype=torch.float64))
