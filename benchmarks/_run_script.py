"""The process of one system of `benchmarks/steps/run.py`: loads, trains and saves, as a user's script does.

    python -m benchmarks._run_script SPEC.json SECONDS_AT_WHICH_IT_WAS_STARTED

It imports what such a script would, since imports are part of a run: tunecompile only where that is the system.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._results import INCOMPLETE, print_row

RANK, LR = 16, 1e-4
SETTLED = 3  #: steps, after which none should be slow
SLOW, SLOW_S = 3.0, 5.0  #: medians, or seconds, that a slow step takes


def load(spec: dict[str, Any], device: str) -> tuple[Any, Any]:
    """Model with adapters and tokenizer, as a user's script loads them."""
    import torch

    lora = {"r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0, **spec["targets"]}
    if spec["engine"] == "unsloth":
        from unsloth import FastLanguageModel

        checkpointing = "unsloth" if spec["checkpointing"] else False
        model, tokenizer = FastLanguageModel.from_pretrained(
            spec["folder"],
            max_seq_length=spec["longest"],
            load_in_4bit=spec["mode"] == "qlora",
            dtype=torch.bfloat16,
            use_gradient_checkpointing=checkpointing,
        )
        return FastLanguageModel.get_peft_model(model, **lora, use_gradient_checkpointing=checkpointing), tokenizer
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    place = {"": 0 if device == "cuda" else device}
    model = AutoModelForCausalLM.from_pretrained(spec["folder"], dtype=dtype, device_map=place)
    model = get_peft_model(model, LoraConfig(**lora, task_type="CAUSAL_LM"))
    if spec["engine"] == "tunecompile":
        import tunecompile

        model = tunecompile.optimize(model, executor="inductor" if device == "cuda" else "eager")
    return model, AutoTokenizer.from_pretrained(spec["folder"])


def settings(spec: dict[str, Any], device: str, out: str) -> dict[str, Any]:
    """What is not TRL's default, the same for all systems."""
    common: dict[str, Any] = {"output_dir": out, "max_steps": spec["steps"], "seed": spec["seed"]}
    common |= {"per_device_train_batch_size": spec["batch"], "gradient_accumulation_steps": spec["accumulation"]}
    common |= {"max_length": spec["longest"], "bf16": device == "cuda", "use_cpu": device == "cpu"}
    common |= {"report_to": [], "save_strategy": "no", "logging_steps": 1}
    common |= {"optim": "adamw_torch_fused", "learning_rate": LR, "lr_scheduler_type": "constant"}  # Unsloth's differ
    if not spec["checkpointing"]:
        common["gradient_checkpointing"] = False
    elif spec["engine"] != "unsloth":  # which is not told in its notebooks
        common["gradient_checkpointing"] = True
    return common


class Clock:
    """Seconds since the process was started, and what was captured by Dynamo, at the end of each step."""

    def __init__(self, begun: float, cuda: bool):
        self.begun, self.cuda = begun, cuda
        self.begin_s = float("nan")  #: when training began
        self.ends: list[float] = []
        self.captured = [captured_graphs()]
        self.losses: list[float] = []

    def now(self) -> float:
        if self.cuda:
            import torch

            torch.cuda.synchronize()
        return time.time() - self.begun

    def callback(self, step_ended: Any) -> Any:
        """A callback of the trainer's. step_ended: is called after each step."""
        from transformers import TrainerCallback

        clock = self

        class Watch(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                clock.begin_s = clock.now()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.ends.append(clock.now())
                clock.captured.append(captured_graphs())

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                if logs and "loss" in logs:
                    clock.losses.append(float(logs["loss"]))
                    step_ended()

        return Watch()

    def figures(self, tokens: int) -> dict[str, Any]:
        """Figures of the steps until now. tokens: of a step in the mean."""
        starts = [self.begin_s, *self.ends]
        steps = [end - start for start, end in zip(starts, self.ends, strict=False)]
        timed = steps[SETTLED:] or steps
        usual = median(timed)
        new = [now - before for before, now in itertools.pairwise(self.captured)]
        return {
            "wall_begin_s": self.begin_s,
            "wall_first_s": self.ends[0],
            "wall_tenth_s": self.ends[9] if len(self.ends) > 9 else None,
            "wall_last_s": self.ends[-1],
            "steps_s": steps,
            "first_step_s": steps[0],
            "repeats": len(timed),
            "step_ms": {"median": 1e3 * usual, "min": 1e3 * min(timed), "max": 1e3 * max(timed)},
            "tokens_per_s": tokens / usual,
            "slow_steps": [SETTLED + i + 1 for i, s in enumerate(steps[SETTLED:]) if s >= SLOW_S or s >= SLOW * usual],
            "captured": {str(i + 1): count for i, count in enumerate(new) if count},
            "losses": self.losses,
        }


def captured_graphs() -> int:
    """How many graphs Dynamo has captured in this process: a count that costs nothing, of all systems."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]


def peaks(cuda: bool) -> dict[str, Any]:
    """Peaks of memory, of the GPU or the host, as `tunecompile.cli.compare.meters` has them."""
    if not cuda:
        import resource

        return {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "peak_reserved_gib": None}
    import torch

    held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return dict(zip(("peak_gib", "peak_reserved_gib"), (each / 2**30 for each in held), strict=True))


def train(spec: dict[str, Any], begun: float) -> dict[str, Any]:
    """The row of one system, in this process. It imports what a user's script would, and prints its row after each step."""
    if spec["engine"] == "unsloth":
        import unsloth  # noqa: F401
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    clock = Clock(begun, cuda)
    torch.manual_seed(spec["seed"])
    model, tokenizer = load(spec, device)
    rows = [{"input_ids": row} for row in json.loads(Path(spec["rows"]).read_text())]
    tokens = sum(len(row["input_ids"]) for row in rows) // spec["steps"]
    with tempfile.TemporaryDirectory() as out:
        arguments = SFTConfig(**settings(spec, device, out))
        about = {"model": model, "args": arguments, "processing_class": tokenizer}
        trainer = SFTTrainer(train_dataset=Dataset.from_list(rows), **about)
        trainer.add_callback(
            clock.callback(lambda: print_row({"status": INCOMPLETE} | clock.figures(tokens) | peaks(cuda)))
        )
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        trainer.save_model(f"{out}/adapter")
        row = {"status": "ok", "wall_s": clock.now()} | clock.figures(tokens) | peaks(cuda)
    if spec["engine"] == "tunecompile":
        import tunecompile

        report = tunecompile.report(model)
        print(report)
        row["compilations"] = report.compiles
    return row


def measure(spec: dict[str, Any], begun: float) -> dict[str, Any]:
    """The row of one system, or why there is none."""
    try:
        return train(spec, begun)
    except Exception as error:
        import traceback

        traceback.print_exc()
        short = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return {"status": "oom" if "OutOfMemory" in type(error).__name__ else f"error: {short}"}


if __name__ == "__main__":
    print_row(measure(json.loads(Path(sys.argv[1]).read_text()), float(sys.argv[2])))
