"""What Inductor does differently while it generates code for a layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tunecompile._torch.generation.cache_keys import keys_without_storages
from tunecompile._torch.generation.direct_passes import direct_passes
from tunecompile._torch.generation.fake_values import values_computed_once
from tunecompile._torch.generation.fused_products import templates_fuse_products
from tunecompile._torch.generation.kernel_order import in_order
from tunecompile._torch.generation.written_arguments import nothing_copied_to_itself


@contextlib.contextmanager
def code_of_layers(traced: bool) -> Iterator[None]:
    """Inside, code is generated as that of a layer. traced: whether torch's structured trace is read."""
    with (
        templates_fuse_products(),
        in_order(),
        keys_without_storages(),
        nothing_copied_to_itself(),
        direct_passes(traced),
        values_computed_once(),
    ):
        yield
