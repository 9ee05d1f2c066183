"""Another package's own tests, once as they are and once with every model in training optimized: what fails only then is our fault.

    pip install diffusers parameterized scipy && pip download --no-deps --no-binary :all: peft==0.21.2 && tar xzf peft-*.tar.gz && touch peft-*/tests/__init__.py
    python benchmarks/suites/suites.py --suite peft-0.21.2 --tests tests/test_custom_models.py tests/test_decoder_models.py tests/test_target_parameters.py tests/test_lora_variants.py \\
        --only "(Lora or lora or LORA) and not Embedding" --sample 2400 --evaluated --processes 2 --out benchmarks/results/suite-peft.json

    pip download --no-deps --no-binary :all: transformers==5.23.0 && tar xzf transformers-*.tar.gz && cp benchmarks/suites/suite_of_transformers.py transformers-5.23.0/
    python benchmarks/suites/suites.py --suite transformers-5.23.0 --tests suite_of_transformers.py --evaluated --processes 4 --out benchmarks/results/suite-transformers.json
    python benchmarks/suites/suites.py --suite transformers-5.23.0 --tests suite_of_transformers.py --only "Qwen3Test or Gemma2Test" --evaluated --out /tmp/transformers.json    # a piece of it

Of a checked-out tree of tests, whose requirements are installed; nothing is fetched: tiny models of the hub that the tests name are stood in for by random ones of
the same architecture. A model is optimized when it is first set to training (`model.train()`, which trainers do as well), or when PEFT has put an adapter into it;
with `--evaluated` also when it is first set to evaluation, as every model is that `from_pretrained` gives.
This file is also the plugin of pytest that does so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
EXECUTOR = "SUITES_EXECUTOR"  #: set in the environment of the tests' processes where models are to be optimized: by what they run
EVALUATED = "SUITES_EVALUATED"  #: set as well where models that are only evaluated are to be optimized too

NOWHERE = "http://127.0.0.1:9"  #: refuses at once: some tests go online whatever HF_HUB_OFFLINE says, and would wait for a name to be found


# ---------------------------------------------------------------- the plugin

SEEN: list[Any] = []  #: models that the running test had optimized


def pytest_configure(config: Any) -> None:
    from huggingface_hub.utils import _http

    _http.time = SimpleNamespace(
        **{**vars(time), "sleep": lambda seconds: None}
    )  # nor is a second try worth waiting for
    if EXECUTOR in os.environ:
        optimize_in_training(os.environ[EXECUTOR])


def pytest_runtest_teardown(item: Any) -> None:
    """How many models of the test ran compiled: one that optimizes nothing says nothing."""
    if EXECUTOR in os.environ:
        import tunecompile

        item.user_properties.append(("compiled", sum(tunecompile.report(model).compiles > 0 for model in SEEN)))
        SEEN.clear()


def optimize_in_training(executor: str) -> None:
    """From now on `train()` optimizes the module that it is called on, not those inside it, and what gives a model an adapter optimizes that."""
    import peft
    from torch import nn

    import tunecompile

    train, make, load, inside = nn.Module.train, peft.get_peft_model, peft.PeftModel.from_pretrained, []

    def optimized(module: nn.Module) -> nn.Module:
        if (
            (module.training or EVALUATED in os.environ)
            and not any(module is seen for seen in SEEN)
            and any(p.requires_grad for p in module.parameters())
        ):
            SEEN.append(tunecompile.optimize(module, executor=executor))
        return module

    def training(module: nn.Module, mode: bool = True) -> nn.Module:
        inside.append(module)
        try:
            train(module, mode)
        finally:
            inside.pop()
        return module if inside else optimized(module)

    nn.Module.train = training
    peft.get_peft_model = lambda *args, **options: optimized(make(*args, **options))
    peft.PeftModel.from_pretrained = lambda *args, **options: optimized(load(*args, **options))


# ---------------------------------------------------------------- both runs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, required=True, help="the folder in which the tests run")
    parser.add_argument("--tests", nargs="+", required=True, help="files or folders in it")
    parser.add_argument("--only", default="", help="pytest's -k")
    parser.add_argument("--sample", type=int, help="so many of them, drawn at random")
    parser.add_argument("--executor", default="eager", help="eager, or inductor")
    parser.add_argument(
        "--evaluated",
        action="store_true",
        help="optimize models that are set to evaluation too: what saves, loads, resizes or reads them then meets an optimized one",
    )
    parser.add_argument("--processes", type=int, default=1, help="at a time (more than one needs pytest-xdist)")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for each of the two runs")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="classes of tests that do not run now stay in this file as an earlier run left them",
    )
    return parser.parse_args()


def stand_ins(given: argparse.Namespace) -> None:
    """A folder like the hub's cache, with a tiny random model for every one of whose architecture's name the tests' ids end."""
    from tests.support import zoo
    from tunecompile.cli.compare.shapes import save_tiny_tokenizer

    files = [
        path
        for name in given.tests
        for path in ([given.suite / name] if name.endswith(".py") else (given.suite / name).rglob("*.py"))
    ]
    ids = {
        found for path in files for found in re.findall(r"""["']([\w-]+/[\w.-]*tiny-[\w.-]+)["']""", path.read_text())
    }
    stems = {name.lower(): family for family, (name, _) in zoo.NAMES.items()}
    for model in ids:
        ending = re.sub(r"forcausallm|lmheadmodel", "", model.rpartition("-")[2].lower())
        if ending in stems:
            folder = given.cache / f"models--{model.replace('/', '--')}"
            place = folder / "snapshots" / ("0" * 40)
            place.mkdir(parents=True)
            (folder / "refs").mkdir()
            (folder / "refs" / "main").write_text("0" * 40)
            zoo.make(stems[ending], vocab_size=1024).save_pretrained(place)
            save_tiny_tokenizer(place)


def pytest(given: argparse.Namespace, *options: str, executor: str | None = None) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_ENDPOINT": NOWHERE,
        "HF_HUB_CACHE": str(given.cache),
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "benchmarks" / "suites"), os.environ.get("PYTHONPATH", "")]
        ),
    }
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-o",
            "addopts=",
            "-W",
            "default",
            "-p",
            "no:cacheprovider",
            "-p",
            "suites",
            *options,
        ],
        check=False,
        cwd=given.suite,
        text=True,
        capture_output=True,
        timeout=given.timeout,
        env=environment | ({EXECUTOR: executor} if executor else {}) | ({EVALUATED: "1"} if given.evaluated else {}),
    )


def chosen(given: argparse.Namespace) -> list[str]:
    """The tests' names, in their order."""
    said = pytest(given, "--collect-only", *given.tests, *(["-k", given.only] if given.only else [])).stdout
    names = [line for line in said.splitlines() if "::" in line and not line.startswith(("ERROR", "FAILED"))]
    if not names:
        raise SystemExit(f"No test was found: {said[-2000:]}")
    picked = set(random.Random(0).sample(names, min(given.sample or len(names), len(names))))
    return [name for name in names if name in picked]


def outcomes(
    given: argparse.Namespace, names: list[str], executor: str | None = None
) -> dict[str, tuple[str, str, bool]]:
    """Of each: passed, skipped or failed; why; and whether a model ran compiled."""
    with tempfile.TemporaryDirectory() as folder:
        listed, told = Path(folder, "names"), Path(folder, "told.xml")
        listed.write_text("\n".join(names))
        several = ["-n", str(given.processes), "--dist", "worksteal"] if given.processes > 1 else []
        done = pytest(given, f"@{listed}", f"--junitxml={told}", *several, executor=executor)
        if not told.exists():
            raise SystemExit(f"The tests did not end: {(done.stdout + done.stderr)[-3000:]}")
        cases = list(ElementTree.parse(told).iter("testcase"))
    found: dict[str, tuple[str, str, bool]] = {}
    for case in cases:  # a test with subtests is told of more than once
        name, (status, why), compiled = (
            f"{case.get('classname')}::{case.get('name')}",
            outcome(case),
            any(entry.get("name") == "compiled" and int(entry.get("value")) for entry in case.iter("property")),
        )
        before = found.get(name, ("", "", False))
        found[name] = (*(before[:2] if before[0] == "failed" else (status, why)), compiled or before[2])
    return found


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    """Of a test in pytest's report: passed, skipped or failed, and why."""
    trouble = next((entry for kind in ("failure", "error", "skipped") for entry in case.iter(kind)), None)
    if trouble is None:
        return "passed", ""
    return "skipped" if trouble.tag == "skipped" else "failed", (trouble.get("message") or "")[:400]


def counted(ran: dict[str, tuple[str, str, bool]]) -> dict[str, int]:
    return {status: sum(found[0] == status for found in ran.values()) for status in ("passed", "skipped", "failed")}


def row(
    kind: str, plain: dict[str, tuple[str, str, bool]], optimized: dict[str, tuple[str, str, bool]]
) -> dict[str, Any]:
    """Of one class of tests: what passes plain and optimized, how many ran compiled models, and what fails only when optimized, or anyway."""
    before, after = (
        {name.partition("::")[2]: found for name, found in ran.items() if name.startswith(f"{kind}::")}
        for ran in (plain, optimized)
    )
    failed = {
        name: (why, before.get(name, ("failed",))[0] != "failed")
        for name, (status, why, _) in after.items()
        if status == "failed"
    }
    return {
        "plain": counted(before),
        "optimized": counted(after),
        "compiled": sum(found[2] for found in after.values()),
        "faults": {name: why for name, (why, ours) in failed.items() if ours},
        "fail_anyway": {name: why for name, (why, ours) in failed.items() if not ours},
    }


def kept(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The classes that an earlier run of the same suite left in the file: a long suite runs in pieces."""
    before = json.loads(given.out.read_text()) if given.out.exists() else {}
    return (
        before["classes"]
        if before.get("suite") == given.suite.resolve().name
        and before.get("tests") == given.tests
        and before.get("executor") == given.executor
        else {}
    )


def main() -> int:
    given = parse_arguments()
    sys.path.insert(0, str(ROOT))
    from tunecompile.cli.compare.machine import header

    with tempfile.TemporaryDirectory() as folder:
        given.cache = Path(folder)
        stand_ins(given)
        names = chosen(given)
        print(f"{len(names)} tests", flush=True)
        plain, optimized = outcomes(given, names), outcomes(given, names, given.executor)
    ran = {kind: row(kind, plain, optimized) for kind in sorted({name.partition("::")[0] for name in optimized})}
    classes = dict(sorted({**kept(given), **ran}.items()))
    totals = {
        which: {
            status: sum(found[which][status] for found in classes.values())
            for status in ("passed", "skipped", "failed")
        }
        for which in ("plain", "optimized")
    }
    totals |= {
        "compiled": sum(found["compiled"] for found in classes.values()),
        "faults": sum(len(found["faults"]) for found in classes.values()),
    }
    given.out.write_text(
        json.dumps(
            {
                **header(),
                "suite": given.suite.resolve().name,
                "tests": given.tests,
                "executor": given.executor,
                "sample": given.sample,
                **totals,
                "classes": classes,
            },
            indent=1,
        )
        + "\n"
    )
    for which, count in (("plain", counted(plain)), ("optimized", counted(optimized))):
        print(f"{which:12s}" + ", ".join(f"{number} {status}" for status, number in count.items()))
    print(f"{sum(found['compiled'] for found in ran.values())} tests ran compiled models")
    faults = {f"{kind}::{name}": why for kind, found in ran.items() for name, why in found["faults"].items()}
    for name, why in faults.items():
        print(f"fails only when optimized: {name}: {why}")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
