"""The first step of several ranks: one compiles, the others take what it made."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tunecompile
from tests.integrations.distributed.ranks import slow
from tests.support.memory.full_device import Tiny, loss
from tests.support.notes import fell_back
from tunecompile.compiler import compile_cache


def _folder():
    """The same, and an empty one, for all ranks."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def _in_turn(rank, folder, graph):
    """Rank 0 comes first, and takes its time. What each found on its turn."""
    dist.barrier()
    time.sleep(0.2 * rank)
    with compile_cache.in_turn(lambda: str(folder), torch.fx.symbolic_trace(lambda x: graph(x)), [torch.ones(2)]):
        if rank:
            return (folder / "made").exists()
        time.sleep(0.5)
        (folder / "made").touch()


def one_after_the_other(rank, ranks):
    assert _in_turn(rank, _folder(), torch.sin) is (True if rank else None)
    assert _in_turn(rank, _folder(), torch.cos if rank else torch.sin) is (False if rank else None)  # of another graph
    with torch._inductor.config.patch(fx_graph_cache=False):
        assert _in_turn(rank, _folder(), torch.sin) is (False if rank else None)  # nothing would be there
    longest, compile_cache.LONGEST = compile_cache.LONGEST, 0.1
    try:
        assert _in_turn(rank, _folder(), torch.sin) is (False if rank else None)  # nobody waits for ever
    finally:
        compile_cache.LONGEST = longest


@slow
def compiled_once(rank, ranks):
    """What one generated the other finds."""
    before, folder = os.environ.get(compile_cache.FOLDER), _folder()
    os.environ[compile_cache.FOLDER] = str(folder)
    torch._dynamo.utils.counters.clear()
    try:
        made = tunecompile.optimize(Tiny().train())
        loss(made).backward()
        found, counted = [None] * ranks, torch._dynamo.utils.counters["inductor"]
        dist.all_gather_object(found, (counted["fxgraph_cache_miss"], counted["fxgraph_cache_hit"]))
        assert not fell_back(made), tunecompile.report(made)  # what no compiler takes is a miss on all ranks, too
        assert sorted(found) == [(0, 2), (2, 0)], found
    finally:
        os.environ.pop(compile_cache.FOLDER)
        os.environ.update({compile_cache.FOLDER: before} if before else {})
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)
