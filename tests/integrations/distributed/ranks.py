"""Cases that several ranks run together, each a process on this machine: with gloo on its CPU, or with NCCL on a GPU each.

A module of cases is a module like any other; each of its functions without an underscore takes (rank, ranks), and asserts. All run in
one set of processes, one after the other: a process takes ten seconds to start, a case a few.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

TIMEOUT = 540  #: seconds; a rank that waits for one that died would wait for half an hour


def slow(case: Callable) -> Callable:
    """A case that `make test-all` runs, and `make test` does not."""
    case.slow = True
    return case


def cases_of(modules: str, slow: bool) -> dict[str, Callable]:
    """By module and name."""
    return {
        f"{module}.{name}": value
        for module in modules.split(",")
        for name, value in vars(importlib.import_module(module)).items()
        if callable(value)
        and value.__module__ == module
        and not name.startswith("_")
        and hasattr(value, "slow") == slow
    }


def run(modules: str, slow: bool, ranks: int, folder: Path, gpus: bool = False, timeout: float = TIMEOUT) -> list[str]:
    """What failed: a traceback for each case and rank."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    if not gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    said = [
        folder / f"{rank}.log" for rank in range(ranks)
    ]  # not pipes: a rank that nobody reads would wait, and the others for it
    if gpus:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, modules, str(int(slow)), str(folder)],
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, log in enumerate(said)
        ]
    else:  # what is imported is imported once: a process that has it forks the ranks
        started = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, modules, str(int(slow)), str(folder), *map(str, said)],
                env=environment,
                start_new_session=True,
            )
        ]
    with contextlib.suppress(subprocess.TimeoutExpired):
        for process in started:
            process.wait(timeout)
    for process in started:
        if gpus:
            process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
    ended = [
        json.loads(path.read_text()) if (path := folder / f"{rank}.json").exists() else {} for rank in range(ranks)
    ]
    return [
        f"{name}, {outcome.get(name) or f'rank {rank} ended before: {said[rank].read_text()[-3000:]}'}"
        for name in cases_of(modules, slow)
        for rank, outcome in enumerate(ended)
        if outcome.get(name, True)
    ]


def main(modules: str, slow: bool, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=ranks,
    )
    outcome, cases = {}, cases_of(modules, slow)
    gc.collect()
    gc.freeze()  # as in tests/conftest.py
    gc.set_threshold(50_000, 20, 100)
    for name, case in cases.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        print(f"{time.strftime('%X')} {name}", flush=True)  # the last one is where ranks hang, if they do
        try:
            case(rank, ranks)
            outcome[name] = ""
        except Exception:
            outcome[name] = f"rank {rank}:\n{traceback.format_exc()}"
        (folder / f"{rank}.json").write_text(json.dumps(outcome))
        failed = [None] * ranks
        dist.all_gather_object(failed, outcome[name])
        if len(set(map(bool, failed))) > 1:
            break  # one rank may be a collective behind
    dist.destroy_process_group()


def fork(modules: str, slow: bool, folder: Path, logs: list[str]) -> None:
    """A process for each rank, which writes to a file of its own."""
    from tests.support import zoo
    from tests.support.compiling import without_profiles

    without_profiles()
    cases_of(modules, slow)
    importlib.import_module("torch._inductor.compile_fx")
    zoo.adapt(zoo.make("llama"))  # brings in what transformers and PEFT import late
    ranks = []
    for rank, log in enumerate(logs):
        if child := os.fork():
            ranks.append(child)
            continue
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        main(modules, slow, folder)
        sys.stdout.flush()
        os._exit(0)
    for child in ranks:
        os.waitpid(child, 0)


if __name__ == "__main__":
    if sys.argv[4:]:
        fork(sys.argv[1], bool(int(sys.argv[2])), Path(sys.argv[3]), sys.argv[4:])
    else:
        main(sys.argv[1], bool(int(sys.argv[2])), Path(sys.argv[3]))
