"""Equal graphs have equal keys, and others have not."""

import pytest
import torch
from torch._inductor import codecache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tunecompile._torch.generation.cache_keys import storages_in_one_form


@pytest.fixture
def given():
    """(Fake tensor of two sizes that are symbols, its mode)."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    return mode.from_tensor(torch.empty(3, 5, 8), symbolic_context=sizes), mode


def key(value: torch.Tensor) -> str:
    """As of a saved tensor."""
    value._is_inductor_static = True
    return str(codecache.extract_tensor_metadata_for_cache_key(value))


def test_a_storage_has_one_key_however_it_was_made(given):
    like, mode = given
    with mode:
        rows, length, width = like.shape
        made = torch.empty(rows, length, width)
        by_strides = torch.empty_strided(made.shape, made.stride())
    assert str(made.untyped_storage().nbytes()) != str(by_strides.untyped_storage().nbytes())
    assert key(made) != key(by_strides)  # what torch does
    with storages_in_one_form():
        assert key(made) == key(by_strides)
    assert key(made) != key(by_strides)


def test_another_storage_has_another_key(given):
    like, mode = given
    with mode, storages_in_one_form():
        rows, length, width = like.shape
        part = torch.empty(rows, length + 1, width)[:, :length]
        padded = torch.empty_strided((rows, length, width), part.stride())
        assert key(torch.empty(rows, length, width)) != key(padded)
        assert key(torch.empty(4, 8)) != key(torch.empty(5, 8)[:4])
