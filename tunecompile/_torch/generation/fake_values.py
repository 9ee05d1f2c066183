"""Fake values of a lowered graph are computed once.

Inductor computes those of all new nodes, and of those behind them that share their memory: twice, and each time with
those of their users, to see what these share. A provider's graph has its values from its trace, all but those of views.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tunecompile._torch.fake_tensors import is_computed
from tunecompile._torch.lookup import exist, lookup, replaced

_PASSES: Any = lookup("torch._inductor.fx_passes.post_grad")
_UPDATER = "torch._inductor.fx_passes.post_grad.FakeTensorUpdater"
_CAN_KNOW = exist("processed_hashes", "hash_node", "incremental_update", under=_UPDATER)


@contextlib.contextmanager
def values_computed_once() -> Iterator[None]:
    """Inside, Inductor computes no value anew that a node's own arguments gave. (See `replaced`.)"""
    if not _CAN_KNOW:
        yield
        return

    class Updater(lookup(_UPDATER)):
        def incremental_update(self) -> Any:
            nodes, known = getattr(self, "gm", self).graph.nodes, self.processed_hashes  # torch 2.13 has the module
            new = [node for node in nodes if self.hash_node(node) not in known]
            for user in {user for node in new for user in node.users}:  # its memory was that of a node that is gone
                known.discard(self.hash_node(user))
            known.update(self.hash_node(node) for node in new if is_computed(node))
            updated = super().incremental_update()
            self.processed_hashes.update(self.hash_node(node) for node in nodes if "val" in node.meta)
            return updated

    with replaced(_PASSES, FakeTensorUpdater=Updater):
        yield
