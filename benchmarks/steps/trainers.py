"""TRL's trainers as users run them: from one step's end to the next, peak memory, first step; one JSON in the common shape.

    python benchmarks/steps/trainers.py --model llama-3.1-8b --trainers dpo,grpo --systems tunecompile,unsloth,hf-checkpoint \\
        --seconds 500 --out benchmarks/results/trainers-llama-3.1-8b-qlora.json

QLoRA of random weights; each trainer and system has a process of its own, and its row is written when it ends. A step of DPO has
4 pairs, one of GRPO 8 completions of a prompt and one of SFT 4 rows of 2,048 tokens. Lengths of completions are drawn as those of
real data, and all systems are given the same. Tokens/s are those of the median step; of GRPO, whose steps differ by their longest row,
of all timed steps but the slowest and the fastest.
Rows of SFT are a tree with `--tree 1024,512,256,256`: a conversation of 1,024 tokens that goes on in two ways of 512, each of them in two
of 256, and so on: 8 rows of 2,048 tokens, of which they have some in common.
GRPO's completions are random tokens, and none is generated, unless `--rollouts` says so: each system then generates as it
does under TRL without an engine, 512 tokens of a prompt of 512 if `--completion 512 --prompt 512` are given.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._results import ENVIRONMENT, print_row, row_apart, run_apart, save_packed
from benchmarks._rows import draw_lengths, draw_tokens
from tunecompile.cli.compare.spec import Job, system

UNTIMED = 4  #: steps: the first compiles, and in the third CUDA graphs are recorded
SETTLED = {"tunecompile": 3, "unsloth": 2}  #: untimed steps with rollouts, which take minutes; one of other systems
PAIRS, COMPLETIONS, ROWS, LENGTH = 4, 8, 4, 2048
TYPICAL, LONGEST, PROMPT = 600, 4096, 200  #: tokens of a completion, and of a prompt


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--trainers", default="dpo,grpo")
    parser.add_argument("--systems", default="tunecompile,unsloth,hf-checkpoint")
    parser.add_argument("--checkpointing", action="store_true", help="with gradient checkpointing, as TRL has it")
    parser.add_argument("--completion", type=int, help="tokens of each completion; drawn, if not given")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of a prompt")
    parser.add_argument("--tree", type=sizes, default=(), help="tokens of each level of a tree that SFT's rows are")
    parser.add_argument("--rollouts", action="store_true", help="GRPO's completions are generated")
    parser.add_argument("--steps", type=int, default=8, help=f"timed steps, after {UNTIMED} that are not")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that all of it may take")
    parser.add_argument("--logs", type=Path, help="folder for the processes' output")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of the process of one system
    return parser.parse_args()


def sizes(text: str) -> tuple[int, ...]:
    """Numbers with commas between them."""
    return tuple(map(int, text.split(",")))


def usual(steps: list[float], trainer: str) -> float:
    """What a step takes that no pause of a host's falls in."""
    return mean(sorted(steps)[1:-1] or steps) if trainer == "grpo" else median(steps)


def words(count: int) -> str:
    """Text of so many tokens of the small tokenizer."""
    return "".join(random.choice("bcdfgjkmnpqsuvxz") for _ in range(count))


def shape_of(trainer: str, given: argparse.Namespace) -> str:
    """ROWSxTOKENS; of rows of several lengths with the median."""
    if trainer == "sft":
        levels = "+".join(map(str, given.tree))
        return f"{2 ** (len(given.tree) - 1)}x tree({levels})" if levels else f"{ROWS}x{LENGTH}"
    rows = 2 * PAIRS if trainer == "dpo" else COMPLETIONS
    if not given.completion:
        return f"{rows}x~{given.prompt + TYPICAL}"
    if given.rollouts:
        return f"{rows}x{given.prompt}+{given.completion}"
    return f"{rows}x({given.prompt}+{given.completion})"


def branches(levels: Sequence[int], ids: Callable[[int], list[int]]) -> list[list[int]]:
    """Rows that go on in two ways at the end of each level."""
    first, *rest = levels
    trunk = ids(first)
    return [trunk + row for _ in range(2) for row in branches(rest, ids)] if rest else [trunk]


def make(
    given: argparse.Namespace, model: Any, tokenizer: Any, common: dict[str, Any], steps: int
) -> tuple[Any, float]:
    """TRL's trainer on random rows, and the tokens of a step in the mean."""
    from datasets import Dataset

    trainer, completion, prompt = given.trainers, given.completion, given.prompt

    def ids(count: int) -> list[int]:
        return draw_tokens(count, model.config.vocab_size)

    about = {"model": model, "processing_class": tokenizer}
    if trainer == "sft":
        from trl import SFTConfig, SFTTrainer

        step = partial(branches, given.tree, ids) if given.tree else lambda: [ids(LENGTH) for _ in range(ROWS)]
        rows = [{"input_ids": row} for _ in range(steps) for row in step()]
        count, length = len(rows) // steps, len(rows[0]["input_ids"])
        common |= {"train_sampling_strategy": "sequential"}
        settings = SFTConfig(**common, per_device_train_batch_size=count, max_length=length)
        return SFTTrainer(args=settings, train_dataset=Dataset.from_list(rows), **about), count * length
    if trainer == "dpo":
        from trl import DPOConfig, DPOTrainer

        longest = max(1024, prompt + (completion or 0))
        counts = [
            [completion] * 2 if completion else draw_lengths(2, TYPICAL, longest - prompt) for _ in range(PAIRS * steps)
        ]
        rows = [{"prompt": words(prompt), "chosen": words(c), "rejected": words(r)} for c, r in counts]
        settings = DPOConfig(**common, per_device_train_batch_size=PAIRS, max_length=longest)
        made = DPOTrainer(ref_model=None, args=settings, train_dataset=Dataset.from_list(rows), **about)
        return made, sum(2 * prompt + c + r for c, r in counts) / steps
    from trl import GRPOConfig, GRPOTrainer

    counts = [
        [completion] * COMPLETIONS if completion else draw_lengths(COMPLETIONS, TYPICAL, LONGEST)
        for _ in range(steps + 2)
    ]
    batch = {"per_device_train_batch_size": COMPLETIONS, "num_generations": COMPLETIONS}
    if given.rollouts:
        batch |= {"generation_kwargs": {"min_new_tokens": completion}}
    made = GRPOTrainer(
        args=GRPOConfig(**common, **batch, max_completion_length=completion or LONGEST, beta=0.0),
        reward_funcs=[lambda completions, **_: [random.random() for _ in completions]],
        train_dataset=Dataset.from_list([{"prompt": words(prompt)} for _ in range(steps)]),
        **about,
    )
    turn = iter(counts)
    if not given.rollouts:
        made._generate_single_turn = lambda *_, **__: ([ids(count) for count in next(turn)], None)
    return made, COMPLETIONS * prompt + sum(map(sum, counts)) / len(counts)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The row of one system and trainer, in this process."""
    about = system(given.systems)
    if about.engine == "unsloth":
        import unsloth  # noqa: F401
    import torch
    from transformers import AutoTokenizer, TrainerCallback

    from tunecompile.cli.compare import models
    from tunecompile.cli.compare.meters import memory_figures, reset_memory

    device = "cuda" if torch.cuda.is_available() else "cpu"
    untimed = SETTLED.get(about.engine, 1) if given.rollouts else UNTIMED
    bf16, steps = device == "cuda", untimed + given.steps
    job = Job(
        system=given.systems,
        model=given.folder,  # loaded as users load one: trainers ask whether it is in 4 bits
        dtype="bfloat16" if bf16 else "float32",
        device=device,
        checkpointing=given.checkpointing,
    )
    model = models.apply_system(models.load_model(job), job)
    ends: list[float] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if len(ends) == untimed:  # else it comes some steps later, once: 0.5 s for what compilation has left
                gc.collect()
            if bf16:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as out:
        common = {"output_dir": out, "max_steps": steps, "logging_steps": 1, "report_to": [], "save_strategy": "no"}
        common |= {"gradient_accumulation_steps": 1}  # unless it is told, Unsloth takes two
        common |= {"bf16": bf16, "use_cpu": not bf16, "learning_rate": 1e-4, "lr_scheduler_type": "constant"}
        common |= {
            "optim": "adamw_torch_fused",
            "gradient_checkpointing": job.checkpoints and about.engine != "unsloth",
        }
        random.seed(0)  # the same rows for all systems, whatever was drawn to load a model
        tokenizer = AutoTokenizer.from_pretrained(given.folder)
        trainer, tokens = make(given, model, tokenizer, common, steps)
        trainer.add_callback(Watch())
        reset_memory(device)
        trainer.train()
    times = [1e3 * (end - begin) for begin, end in itertools.pairwise(ends)]
    timed = times[untimed:]
    if about.engine == "tunecompile":
        import tunecompile

        print(tunecompile.report(model))
    return {
        "status": "ok",
        "repeats": len(timed),
        "tokens_per_s": 1e3 * tokens / usual(timed, given.trainers),
        "step_ms": {"median": median(timed), "min": min(timed), "max": max(timed)},
        "all_step_ms": times,
        "first_step_s": times[0] / 1e3,
        **memory_figures(device),
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    }


def run(given: argparse.Namespace, trainer: str, name: str, folder: str, seconds: float) -> dict[str, Any]:
    """The row of one system and trainer, from a process of its own."""
    command = [sys.executable, __file__, "--model", given.model, "--trainers", trainer, "--systems", name]
    command += ["--steps", str(given.steps), "--folder", folder, "--out", str(given.out)]
    command += ["--completion", str(given.completion)] if given.completion else []
    command += ["--prompt", str(given.prompt), *["--rollouts"] * given.rollouts]
    command += ["--tree", ",".join(map(str, given.tree))] if given.tree else []
    command += ["--checkpointing"] * given.checkpointing
    return row_apart(command, given.logs / f"{trainer}-{name}.log", seconds)


def main() -> int:
    given = parse_arguments()
    os.environ |= ENVIRONMENT
    if given.folder:
        print_row(measure(given))
        return 0
    cases = {}
    for trainer, name in itertools.product(given.trainers.split(","), given.systems.split(",")):
        about = {"system": name, "model": given.model, "mode": "qlora", "trainer": trainer}
        about |= {
            "shape": shape_of(trainer, given),
            "checkpointing": Job(system=name, model=given.model, checkpointing=given.checkpointing).checkpoints,
            "budget_gib": None,
        }
        cases[f"{trainer} {name}"] = about | ({"layers": given.layers} if given.layers else {})
    return run_apart(
        given,
        cases,
        partial(save_packed, given),
        run=lambda case, folder, seconds: run(given, *case.split(), folder, seconds),
        tell=lambda row: f"{row['step_ms']['median']:.1f} ms, {row['peak_gib']:.1f} GiB",
    )


if __name__ == "__main__":
    raise SystemExit(main())
