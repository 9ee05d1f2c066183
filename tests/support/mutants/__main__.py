"""The commands `map` and `run`, see the package."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.support.mutants.mutate import FOLDERS, ROOT, Imported, Mutant, Planter, all_mutants, body_of

TESTS = (
    *("ir", "planner", "compiler", "passes", "runtime", "ops", "estimate", "verification"),
    "integrations/test_trl.py",  # of the loss head's scores
)
SECONDS = 20.0  #: of tests for one mutant, as long as they took without one
#: seconds after which a mutant counts as killed, since it runs for ever: to start, and how often what its tests took
START, SLOWER = 40.0, 5
#: packages that are loaded once, for all mutants
LOADED = (
    *("pytest", "hypothesis", "torch._dynamo", "torch._inductor.compile_fx", "torch._functorch.aot_autograd"),
    *("transformers.models.llama.modeling_llama", "peft", "bitsandbytes", "triton"),
)
#: outcomes of pytest that say nothing: it was called wrongly, or found no test
NOT_RUN = (4, 5)
TOO_LATE = 99  #: of a mutant of what runs at import, in a process that has imported it


def load() -> None:
    """Import what all tests need, once for all children."""
    for name in LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def files_of(tests: list[str]) -> list[str]:
    """The files of tests in these folders, the longest first."""
    paths = [Path(ROOT, test) for test in tests]
    found = [file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
    return [str(file.relative_to(ROOT)) for file in sorted(found, key=lambda file: -file.stat().st_size)]


def make_map(target: Path, tests: list[str], processes: int, seconds: float) -> None:
    """Run tests, a process a file, and write what each of them runs."""
    load()
    waiting, running, end = files_of(tests)[::-1], {}, time.time() + seconds
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.support.mutants.lines", "--tb=line"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LINES"] = f"{folder}/part"
        while (waiting or running) and time.time() < end:
            while waiting and len(running) < processes:
                file = waiting.pop()
                running[in_a_child([*options, "-m", "not gpu and not slow", file], f"{folder}/{len(waiting)}.out")] = (
                    file
                )
            done, status = os.waitpid(-1, os.WNOHANG)
            if done:
                file, code = running.pop(done), os.waitstatus_to_exitcode(status)
                if code not in (0, *NOT_RUN):
                    print(f"{file}: pytest ended with {code}")
            else:
                time.sleep(0.05)
        for child, file in running.items():
            os.kill(child, signal.SIGKILL)
            print(f"{file}: not done")
        print(f"{len(waiting)} files were not begun")
        found = {}
        for part in Path(folder).glob("part.*.json"):
            found |= json.loads(part.read_text())
    passed = {test: entry for test, entry in found.items() if entry.get("passed")}
    target.write_text(json.dumps(passed))
    print(f"{len(passed)} tests that pass of {len(found)}")


def in_a_child(options: list[str], output: str, mutant: Mutant | None = None, imported: Imported | None = None) -> int:
    """The number of a process that runs pytest, with a mutant or without. It exits as pytest does, or with `TOO_LATE`."""
    if (child := os.fork()) != 0:
        return child
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 3
    try:
        import pytest

        if mutant is not None and imported is None:
            Planter(mutant).plant()
        late = mutant is not None and imported is not None and not imported.plant(mutant)
        code = TOO_LATE if late else int(pytest.main(options))
    finally:
        os._exit(code)


class Coverage:
    """Which tests a mutant is shown to."""

    def __init__(self, file: Path):
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, int] = {}  #: that a test runs
        self.by_line: dict[tuple[str, int], list[str]] = defaultdict(list)
        self.by_file: dict[str, list[str]] = defaultdict(list)
        for test, entry in json.loads(file.read_text()).items():
            self.seconds[test] = entry["seconds"]
            self.lines[test] = sum(map(len, entry["lines"].values()))
            for source, lines in entry["lines"].items():
                self.by_file[source].append(test)
                for line in lines:
                    self.by_line[source, line].append(test)

    def of(self, mutant: Mutant, limit: float = SECONDS, at_import: bool = False) -> tuple[list[str], int]:
        """(tests to run, how many there are). A line that runs at import is shown to all tests of its file, and so is
        one of a function that is called then (`at_import`), where no test runs it.

        Those that run the fewest other lines come first; of tests of a whole file, those of its own name.
        """
        begin = body_of(mutant.file, mutant.line)
        lines = range(
            mutant.line, (begin or mutant.line) - 1, -1
        )  # an expression of many lines runs with an earlier one
        found = next((tests for line in lines if (tests := self.by_line.get((mutant.file, line)))), [])
        if begin is None or at_import:
            found = found or self.by_file.get(mutant.file, [])
        chosen, total, name = [], 0.0, f"test_{Path(mutant.file).stem}"
        for test in sorted(found, key=lambda test: (name not in test, self.lines[test], self.seconds[test])):
            if chosen and total + self.seconds[test] > limit:
                continue
            chosen.append(test)
            total += self.seconds[test] + 0.05
        return chosen, len(found)


def fate(mutant: Mutant | None, tests: list[str], seconds: float, imported: Imported | None = None) -> str:
    """`killed`, `survived`, `endless`, `not run` or `too late`: of one mutant in a process of its own."""
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
    child = in_a_child([*options, *tests], os.devnull, mutant, imported)
    begin = time.time()
    while time.time() - begin < START + SLOWER * seconds:
        done, status = os.waitpid(child, os.WNOHANG)
        if done and os.WIFEXITED(status) and os.WEXITSTATUS(status) in NOT_RUN:
            return "not run"
        if done and os.WIFEXITED(status) and os.WEXITSTATUS(status) == TOO_LATE:
            return "too late"
        if done:
            return "survived" if status == 0 else "killed"
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "endless"


def import_all(files: list[str]) -> Imported:
    """Import files of tests, and what they import."""
    import pytest

    with Imported() as imported, open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files])
    return imported


def worker(mutants: list[Mutant], tests: Coverage, end: float, out: Path) -> None:
    """Judge mutants, one after another, until the time is over; a line of JSON for each.

    Those of functions are planted where all is imported, which is once; the others in a process that imported nothing.
    """
    if (child := os.fork()) == 0:
        files = {test.partition("::")[0] for mutant in mutants for test in tests.of(mutant)[0]}
        judge(mutants, tests, end, out, import_all(sorted(files)))
        os._exit(0)
    os.waitpid(child, 0)
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    late = {(line["file"], line["number"]) for line in lines if line.get("fate") == "too late"}
    out.write_text("".join(json.dumps(line) + "\n" for line in lines if line.get("fate") != "too late"))
    judge([mutant for mutant in mutants if (mutant.file, mutant.number) in late], tests, end, out, None)


def judge(mutants: list[Mutant], tests: Coverage, end: float, out: Path, imported: Imported | None) -> None:
    with out.open("a") as file:
        for number, mutant in enumerate(mutants):
            chosen, count = tests.of(mutant, at_import=imported is None)
            seconds = sum(tests.seconds[test] for test in chosen)
            if number == 0 and chosen:
                file.write(json.dumps({"control": fate(None, chosen, seconds, imported), "tests": chosen}) + "\n")
            if time.time() > end:
                return
            if not chosen and imported is not None and imported.has_run(mutant):
                result = "too late"  # a pattern, of which graphs are made at import
            else:
                result = fate(mutant, chosen, seconds, imported) if chosen else "no tests"
            if result == "not run" and fate(None, chosen, seconds) == "survived":
                result = "killed"  # its module cannot be imported any more
            shown = {"file": mutant.file, "line": mutant.line, "before": mutant.before, "after": mutant.after}
            told = {"fate": result, "ran": len(chosen), "of": count, "number": mutant.number, "tests": chosen[:3]}
            file.write(json.dumps({**shown, **told}) + "\n")
            file.flush()


def run(arguments: argparse.Namespace) -> None:
    """Judge a sample, and print who survives."""
    tests, end = Coverage(arguments.map), time.time() + arguments.seconds
    found = all_mutants(tuple(arguments.folders or FOLDERS))
    sample = random.Random(arguments.seed).sample(found, min(arguments.sample or len(found), len(found)))
    load()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for number in range(arguments.processes):
            if (child := os.fork()) == 0:
                worker(sample[number :: arguments.processes], tests, end, Path(folder, f"{number}.json"))
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        lines = [json.loads(line) for file in Path(folder).glob("*.json") for line in file.read_text().splitlines()]
    if arguments.out:
        arguments.out.write_text(json.dumps(lines, indent=1))
    for line in lines:
        if line.get("control") not in (None, "survived"):
            print("CONTROL FAILED", line["control"], *line["tests"][:3])
    judged = [line for line in lines if "fate" in line]
    fates = Counter(line["fate"] for line in judged)
    for line in sorted(judged, key=lambda line: (line["file"], line["line"])):
        if line["fate"] in ("survived", "no tests"):
            what = line["fate"] if line["fate"] == "no tests" else f"{line['ran']}/{line['of']}"
            print(f"{line['file']}:{line['line']} [{what}] {line['before']}  ->  {line['after']}")
    shown, dead = fates["survived"] + fates["killed"] + fates["endless"], fates["killed"] + fates["endless"]
    print(dict(fates), f"of {len(sample)} drawn, {len(found)} in all: {100 * dead / max(shown, 1):.1f} % are killed")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutants", description=__doc__)
    parser.add_argument("command", choices=["map", "run"])
    parser.add_argument("map", type=Path)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--folders", nargs="*")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "map":
        tests = arguments.tests or [f"tests/{folder}" for folder in TESTS]
        make_map(arguments.map, tests, arguments.processes, arguments.seconds)
    else:
        run(arguments)


if __name__ == "__main__":
    main()
