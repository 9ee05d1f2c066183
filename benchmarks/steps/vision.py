"""Training steps on images beside text, whose sizes change from batch to batch: times, compilations, memory; one JSON.

    python benchmarks/steps/vision.py --model qwen3-vl-4b --tower trained --seconds 900 \\
        --systems hf,hf-checkpoint,unsloth,unsloth-no-checkpoint,tunecompile --out benchmarks/results/vision-qwen3-vl-4b-tower.json

    python benchmarks/steps/vision.py --model qwen3-vl-8b --tower frozen --text 1024 --sizes 100 --steps 78 --out ...

LoRA on random weights: on all linears, the vision tower's too, or on the text model's alone (`--tower frozen`). Each row has one
image before its text; the image is not predicted. A batch has images of one size. Up to ten sizes come in turn, again and again;
more of them are drawn at random, and each comes once in as many batches. Each system has a process of its own, and its row is
written when it ends. Without a GPU, `--model qwen3-vl-tiny` is for trials.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._results import ENVIRONMENT, print_row, run_apart, system_apart
from benchmarks._steps import tell, train
from tunecompile.cli.compare.spec import Job, system

if TYPE_CHECKING:
    from torch import Tensor, nn

ROWS, RANK, LR = 4, 16, 1e-4
UNTIMED = 30  #: steps: the first compile, and each of ten sizes was there three times
#: height and width of images in patches, about 512x512 pixels: 144 to 400 tokens, 257 in the mean
SIZES = ((32, 32), (24, 24), (40, 40), (28, 36), (24, 40), (34, 30), (26, 30), (38, 36), (40, 32), (26, 26))
DRAWN = range(16, 49, 2)  #: of which heights and widths are drawn, where there are more sizes
PATCH, FRAMES, MERGED = 16, 2, 2  #: pixels of a patch's edge, frames of a patch, patches of a token's edge


def _text(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head: int, **more: Any) -> dict:
    side = 5 * head // 32  # pairs that are rotated by height, and by width; time has the others
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
    rope["mrope_section"] = [head // 2 - 2 * side, side, side]
    sizes = dict(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, head_dim=head)
    return sizes | dict(num_attention_heads=heads, num_key_value_heads=kv_heads, rope_parameters=rope) | more


def _tower(hidden: int, intermediate: int, layers: int, heads: int, out: int, stacked: Sequence[int]) -> dict:
    sizes = dict(hidden_size=hidden, intermediate_size=intermediate, depth=layers, num_heads=heads)
    return sizes | dict(out_hidden_size=out, deepstack_visual_indexes=list(stacked))


#: model -> (text model, vision tower, other fields of the config)
MODELS = {
    "qwen3-vl-4b": (
        _text(2560, 9728, 36, 32, 8, 128, vocab_size=151936),
        _tower(1024, 4096, 24, 16, 2560, (5, 11, 17)),
        {"tie_word_embeddings": True},
    ),
    "qwen3-vl-8b": (
        _text(4096, 12288, 36, 32, 8, 128, vocab_size=151936),
        _tower(1152, 4304, 27, 16, 4096, (8, 16, 24)),
        {"tie_word_embeddings": False},
    ),
    "qwen3-vl-tiny": (
        _text(64, 128, 3, 4, 2, 16, vocab_size=512),
        _tower(32, 64, 3, 2, 64, (0, 1)),
        {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503},
    ),
}
#: linears of the text model, as PEFT matches whole names
TEXT = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-vl-4b")
    parser.add_argument("--tower", choices=("trained", "frozen"), default="trained")
    parser.add_argument("--layers", type=int, help="of the text model")
    parser.add_argument("--text", type=int, default=256, help="tokens of a row, besides its image")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="of images")
    parser.add_argument("--systems", default="hf,hf-checkpoint,unsloth,unsloth-no-checkpoint,tunecompile")
    parser.add_argument("--steps", type=int, default=20, help=f"timed steps, after {UNTIMED} that are not")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that all of it may take")
    parser.add_argument("--logs", type=Path, help="folder for the processes' output")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of the process of one system
    return parser.parse_args()


def sizes_of(count: int) -> list[tuple[int, int]]:
    """So many different sizes, always the same."""
    if count <= len(SIZES):
        return list(SIZES[:count])
    return random.Random(0).sample([(height, width) for height in DRAWN for width in DRAWN], count)


def shape_of(text: int, sizes: int) -> str:
    """ROWSxTOKENS+PIXELS of an image's edge, about so many where there are several sizes."""
    return f"{ROWS}x{text}+{'~' * (sizes > 1)}{SIZES[0][0] * PATCH}px"


def save(name: str, folder: str, layers: int | None, device: str) -> None:
    """Save a random model in bf16, and a tokenizer, since loaders ask for one."""
    import torch
    from transformers import AutoModelForImageTextToText, Qwen3VLConfig

    from tunecompile.cli.compare.shapes import save_tiny_tokenizer

    text, tower, more = MODELS[name]
    text = text | {"tie_word_embeddings": more.get("tie_word_embeddings", False)}
    config = Qwen3VLConfig(
        text_config=text | ({"num_hidden_layers": layers} if layers else {}), vision_config=tower, **more
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    save_tiny_tokenizer(Path(folder))


def load(job: Job, tower: str) -> nn.Module:
    """The model as users of the system load one, with adapters of the same values in each."""
    import torch

    from tunecompile.cli.compare.models import placement, set_initial_adapter

    dtype = getattr(torch, job.dtype)
    if job.engine == "unsloth":
        model = load_unsloth(job, tower)
    else:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_pretrained(
            job.model, dtype=dtype, attn_implementation="sdpa", **placement(job)
        )
        model.config.use_cache = False
        targets = "all-linear" if tower == "trained" else TEXT
        model = get_peft_model(
            model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets, task_type="CAUSAL_LM")
        )
        if job.checkpoints:  # (inputs without gradients will do: with them, a frozen tower would have a backward pass)
            model.gradient_checkpointing_enable({"use_reentrant": False})
    set_initial_adapter(model, job.seed)
    if job.engine == "tunecompile":
        import tunecompile

        model = tunecompile.optimize(model, executor="inductor" if job.device == "cuda" else "eager")
    return model.train()


def load_unsloth(job: Job, tower: str) -> nn.Module:
    """Load and adapt with Unsloth's functions. The process has to import unsloth first."""
    import torch
    from unsloth import FastVisionModel

    checkpointing = "unsloth" if job.checkpoints else False
    model, _ = FastVisionModel.from_pretrained(
        job.model,
        load_in_4bit=False,
        dtype=getattr(torch, job.dtype),
        max_seq_length=4096,
        use_gradient_checkpointing=checkpointing,
    )
    model = FastVisionModel.get_peft_model(
        model,
        finetune_vision_layers=tower == "trained",
        finetune_language_layers=True,
        finetune_attention_modules=True,
        finetune_mlp_modules=True,
        r=RANK,
        lora_alpha=RANK,
        lora_dropout=0,
        use_gradient_checkpointing=checkpointing,
    )
    FastVisionModel.for_training(model, use_gradient_checkpointing=job.checkpoints)
    return model


def make_batch(config: Any, number: int, size: tuple[int, int], text: int, device: str) -> dict[str, Tensor]:
    """Random pixels and tokens: a row has its image first."""
    import torch

    height, width = size
    patches, features = height * width, height * width // MERGED**2
    generator = torch.Generator(device).manual_seed(number)
    image = [config.vision_start_token_id, *[config.image_token_id] * features, config.vision_end_token_id]
    known = min(config.image_token_id, 100_000)
    words = torch.randint(3, known, (ROWS, text), generator=generator, device=device)
    ids = torch.cat([torch.tensor(image, device=device).expand(ROWS, -1), words], 1)
    labels = ids.clone()
    labels[:, : len(image)] = -100
    pixels = ROWS * patches, 3 * FRAMES * PATCH**2
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
        "pixel_values": torch.randn(pixels, generator=generator, device=device),
        "image_grid_thw": torch.tensor([[1, height, width]] * ROWS, device=device),
    }


def steps(model: nn.Module, job: Job, given: argparse.Namespace) -> Iterator[tuple[Callable[[], Tensor], int]]:
    """The loss of each step, and its tokens: the sizes come in turn."""
    from tunecompile.cli.compare.models import precision

    sizes = sizes_of(given.sizes)
    for number in range(UNTIMED + given.steps):
        batch = make_batch(model.config, number, sizes[number % len(sizes)], given.text, job.device)

        def loss(batch: dict[str, Tensor] = batch) -> Tensor:
            with precision(job):
                return model(**batch).loss

        yield loss, batch["input_ids"].numel()


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The row of one system, in this process."""
    about = system(given.systems)
    if about.engine == "unsloth":
        import unsloth  # noqa: F401
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    job = Job(system=given.systems, model=given.folder, mode="lora", trainer="loop", lr=LR, dtype=dtype, device=device)
    model = load(job, given.tower)
    row = train(model, steps(model, job, given), UNTIMED, LR, device)
    if about.engine == "tunecompile" and row["status"] == "ok":
        import tunecompile

        print(tunecompile.report(model))
    return row


def run(given: argparse.Namespace, name: str, folder: str, seconds: float) -> dict[str, Any]:
    """The row of one system, from a process of its own."""
    options = ("model", "tower", "text", "sizes", "steps")
    return system_apart(given, __file__, name, options, seconds, "--folder", folder)


def main() -> int:
    given = parse_arguments()
    os.environ |= ENVIRONMENT
    if given.folder:
        print_row(measure(given))
        return 0
    cases = {}
    for name in given.systems.split(","):
        about = {"system": name, "model": given.model, "mode": "lora", "tower": given.tower, "budget_gib": None}
        about |= {"shape": shape_of(given.text, given.sizes), "images": given.sizes, "rank": RANK}
        about |= {"checkpointing": bool(system(name).checkpointing)}
        cases[name] = about | ({"layers": given.layers} if given.layers else {})
    return run_apart(
        given,
        cases,
        save=lambda folder, device: save(given.model, folder, given.layers, device),
        run=lambda name, folder, seconds: run(given, name, folder, seconds),
        tell=tell,
    )


if __name__ == "__main__":
    raise SystemExit(main())
