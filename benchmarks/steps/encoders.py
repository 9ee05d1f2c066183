"""Training steps of encoders on batches of one size, ViT with all weights and Whisper with LoRA: times, graphs, memory; one JSON.

    python benchmarks/steps/encoders.py --model vit-l-14 --seconds 150 --out benchmarks/results/encoders-vit-l-14.json
    python benchmarks/steps/encoders.py --model whisper-large-v3 --rows 8 --out ...

Random weights in bf16, made where they are used, under autocast. `compile-layers` is torch.compile of each layer. Each system has a
process of its own, and its row is written when it ends. Without a GPU, models whose names end in `-tiny` are for trials.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._results import ENVIRONMENT, print_row, run_apart, system_apart
from benchmarks._steps import tell, train
from tunecompile.cli.compare.spec import Job, system

if TYPE_CHECKING:
    from torch import Tensor, nn

RANK, LR = 16, 1e-5
UNTIMED = 6  #: steps
VIT, WHISPER = "ViTForImageClassification", "WhisperForConditionalGeneration"
_WHISPER = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, use_cache=False)
#: model -> its class, rows of a batch, and its config where that differs from the class's own
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "vit-l-14": (
        VIT,
        64,
        dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
        | dict(patch_size=14, num_labels=1000),
    ),
    "whisper-large-v3": (
        WHISPER,
        8,
        dict(_WHISPER, vocab_size=51866, num_mel_bins=128, d_model=1280, encoder_layers=32, decoder_layers=32)
        | dict(encoder_attention_heads=20, decoder_attention_heads=20, encoder_ffn_dim=5120, decoder_ffn_dim=5120),
    ),
    "vit-tiny": (
        VIT,
        4,
        dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
        | dict(patch_size=14, image_size=56, num_labels=10),
    ),
    "whisper-tiny": (
        WHISPER,
        2,
        dict(_WHISPER, vocab_size=64, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2)
        | dict(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64)
        | dict(max_source_positions=12),
    ),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="vit-l-14")
    parser.add_argument("--rows", type=int, help="of a batch; by default the model's")
    parser.add_argument("--text", type=int, default=128, help="tokens of a transcript")
    parser.add_argument("--systems", default="hf,hf-checkpoint,compile-layers,tunecompile")
    parser.add_argument("--steps", type=int, default=20, help=f"timed steps, after {UNTIMED} that are not")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that all of it may take")
    parser.add_argument("--logs", type=Path, help="folder for the processes' output")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # the process of one system
    given = parser.parse_args()
    given.rows = given.rows or MODELS[given.model][1]
    return given


def mode_of(given: argparse.Namespace) -> str:
    """What is trained: all weights of ViT, adapters on the linears of Whisper's layers."""
    return "full" if MODELS[given.model][0] == VIT else "lora"


def build(given: argparse.Namespace, job: Job) -> nn.Module:
    """The model as users of the system train it, of the same values in each."""
    import torch
    import transformers

    from tunecompile.cli.compare.loops import enable_checkpointing
    from tunecompile.cli.compare.models import apply_system, set_initial_adapter

    kind, _, fields = MODELS[given.model]
    made = getattr(transformers, kind)
    torch.manual_seed(0)
    with torch.device(job.device):
        model = made(made.config_class(**fields)).to(getattr(torch, job.dtype))
        if job.mode == "lora":
            from peft import LoraConfig, get_peft_model

            linears = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
            model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=linears))
    set_initial_adapter(model, job.seed)
    enable_checkpointing(model, job)
    return apply_system(model.train(), job)


def make_batch(config: Any, number: int, given: argparse.Namespace, device: str) -> dict[str, Tensor]:
    """Random images and classes, or random sounds and words."""
    import torch

    generator = torch.Generator(device).manual_seed(number)

    def numbers(below: int, *shape: int) -> Tensor:
        return torch.randint(4, below, shape, generator=generator, device=device)

    if MODELS[given.model][0] == VIT:
        side = given.rows, 3, config.image_size, config.image_size
        images = torch.randn(side, generator=generator, device=device)
        return {"pixel_values": images, "labels": numbers(config.num_labels, given.rows)}
    sound = given.rows, config.num_mel_bins, 2 * config.max_source_positions
    return {
        "input_features": torch.randn(sound, generator=generator, device=device),
        "labels": numbers(config.vocab_size, given.rows, given.text),
    }


def steps(model: nn.Module, job: Job, given: argparse.Namespace) -> Iterator[tuple[Callable[[], Tensor], int]]:
    """The loss of each step, and its rows, in the place of tokens."""
    from tunecompile.cli.compare.models import precision

    for number in range(UNTIMED + given.steps):
        batch = make_batch(model.config, number, given, job.device)

        def loss(batch: dict[str, Tensor] = batch) -> Tensor:
            with precision(job):
                return model(**batch).loss

        yield loss, given.rows


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The row of one system, in this process."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    about = dict(model=given.model, mode=mode_of(given), trainer="loop", lr=LR, dtype=dtype, device=device)
    job = Job(system=given.systems, **about)
    model = build(given, job)
    row = train(model, steps(model, job, given), UNTIMED, LR, device)
    if job.engine == "tunecompile" and row["status"] == "ok":
        import tunecompile

        print(tunecompile.report(model))
    return row


def run(given: argparse.Namespace, name: str, _folder: str, seconds: float) -> dict[str, Any]:
    """The row of one system, from a process of its own."""
    options = ("model", "rows", "text", "steps")
    return system_apart(given, __file__, name, options, seconds, "--alone")


def main() -> int:
    given = parse_arguments()
    os.environ |= ENVIRONMENT
    if given.alone:
        print_row(measure(given))
        return 0
    about = {"model": given.model, "mode": mode_of(given), "budget_gib": None, "shape": f"{given.rows}x1"}
    about |= {"rank": RANK, "text": given.text} if about["mode"] == "lora" else {}
    cases = {
        name: {"system": name, "checkpointing": bool(system(name).checkpointing), **about}
        for name in given.systems.split(",")
    }
    return run_apart(given, cases, save=lambda *_: None, run=lambda *of: run(given, *of), tell=tell)


if __name__ == "__main__":
    raise SystemExit(main())
