"""Training steps of a diffusion transformer of diffusers: times, compilations, memory; one JSON.

    python benchmarks/steps/diffusion.py --mode qlora --pixels 1024 --buckets 10 \\
        --systems hf,hf-checkpoint,compile-blocks,tunecompile --out benchmarks/results/flux.1-dev-qlora-10x1024px.json

    python benchmarks/steps/diffusion.py --layers 4 --pixels 512 --buckets 1 --seconds 170 --out ...

Flow matching with LoRA on the linears that diffusers' script for Flux adapts, random weights in bf16 or NF4, made where they are
used. `--buckets` counts the aspects whose images come in turn, all of about as many pixels. `compile-blocks` is diffusers'
`compile_repeated_blocks`. Each system has a process of its own, and its row is written when it ends. Without a GPU, `--model
flux-tiny` is for trials.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._results import ENVIRONMENT, print_row, row_apart, run_apart
from benchmarks.steps.vision import SETTLED, figures, tell
from tunecompile.cli.compare.spec import system

if TYPE_CHECKING:
    from torch import Tensor, nn

RANK, LR, TEXT = 16, 1e-4, 512  #: of adapters; tokens of a caption
TIMES = 2  #: that each bucket comes before it is timed, and then again
TOKEN = 16  #: pixels of a token's edge
BLOCKS = "compile-blocks"
#: height and width in sixteenths of an image's edge, whose product is about 256
ASPECTS = ((16, 16), (18, 14), (14, 18), (19, 13), (13, 19), (21, 12), (12, 21), (24, 10), (10, 24), (17, 15))
#: ends of the names of adapted linears, as diffusers' train_dreambooth_lora_flux.py has them
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
TARGETS += ["ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"]
#: model -> its config; FluxTransformer2DModel's defaults but for these
MODELS: dict[str, dict[str, Any]] = {
    "flux.1-dev": {},
    "flux-tiny": dict(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        axes_dims_rope=(8, 12, 12),
    ),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="flux.1-dev")
    parser.add_argument("--mode", choices=("lora", "qlora"), default="lora", help="the frozen weights: bf16, or NF4")
    parser.add_argument("--layers", type=int, help="of joint blocks, at least 2, and twice as many of single ones")
    parser.add_argument("--pixels", type=int, default=1024, help="of a square image's edge")
    parser.add_argument("--buckets", type=int, default=1, choices=range(1, len(ASPECTS) + 1), metavar="1..10")
    parser.add_argument("--rows", type=int, default=1, help="images of a batch")
    parser.add_argument("--text", type=int, default=TEXT, help="tokens of a caption")
    parser.add_argument("--systems", default=f"hf,hf-checkpoint,{BLOCKS},tunecompile")
    parser.add_argument("--steps", type=int, default=10, help="timed steps at least; each bucket is timed as often")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that all of it may take")
    parser.add_argument("--logs", type=Path, help="folder for the processes' output")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # the process of one system
    return parser.parse_args()


def sizes_of(pixels: int, buckets: int) -> list[tuple[int, int]]:
    """Height and width of images in tokens, of so many aspects."""
    side = pixels // TOKEN
    return [(side * height // 16, side * width // 16) for height, width in ASPECTS[:buckets]]


def build(given: argparse.Namespace, device: str) -> nn.Module:
    """The model of random weights with adapters, the same for all systems."""
    import torch
    from diffusers import FluxTransformer2DModel
    from peft import LoraConfig

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config: dict[str, Any] = {"guidance_embeds": True} | MODELS[given.model]
    if given.layers:
        config |= {"num_layers": given.layers, "num_single_layers": 2 * given.layers}
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = FluxTransformer2DModel(**config)
        if given.mode == "qlora":
            pack(model, dtype)
        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, init_lora_weights="gaussian", target_modules=TARGETS))
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model.train()


def pack(model: nn.Module, dtype: Any) -> None:
    """Quantise the linears of all blocks, as diffusers' own config for bitsandbytes does."""
    import torch
    from torch import nn

    from tunecompile.cli.compare.shapes import quantised_linear

    for path, module in list(model.named_modules()):
        if "blocks." in path and isinstance(module, nn.Linear):
            new = quantised_linear(module, module.weight.data, dtype, torch.uint8)
            new.bias = module.bias
            model.set_submodule(path, new)
    setattr(model, "is_loaded_in_4bit", True)  # noqa: B010 (PEFT reads it to choose its layer class)


def make_batch(model: nn.Module, number: int, size: tuple[int, int], rows: int, text: int) -> dict[str, Tensor]:
    """Noisy latents, their captions and places, and the velocity that is to be predicted, as "target"."""
    import torch

    config, (height, width) = model.config, size
    parameter = next(model.parameters())
    device = parameter.device
    generator = torch.Generator(device).manual_seed(number)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=parameter.dtype)

    places = torch.zeros(height, width, 3, device=device)
    places[..., 1] += torch.arange(height, device=device)[:, None]
    places[..., 2] += torch.arange(width, device=device)[None]
    return {
        "hidden_states": random(rows, height * width, config.in_channels),
        "encoder_hidden_states": random(rows, text, config.joint_attention_dim),
        "pooled_projections": random(rows, config.pooled_projection_dim),
        "timestep": torch.rand(rows, generator=generator, device=device),
        "guidance": torch.full((rows,), 3.5, device=device),
        "img_ids": places.reshape(-1, 3),
        "txt_ids": torch.zeros(text, 3, device=device),
        "target": random(rows, height * width, config.in_channels),
    }


def prepare(model: nn.Module, name: str, device: str) -> nn.Module:
    """The model as users of a system train it."""
    if name == BLOCKS:
        model.compile_repeated_blocks(backend="inductor" if device == "cuda" else "eager")
        return model
    about = system(name)
    if about.checkpointing:
        model.enable_gradient_checkpointing()
    if about.engine == "tunecompile":
        import tunecompile

        model = tunecompile.optimize(
            model, executor="inductor" if device == "cuda" else "eager", memory=about.memory, precision=about.precision
        )
    return model


def train(model: nn.Module, given: argparse.Namespace, device: str) -> dict[str, Any]:
    """What each step took, its tokens and loss, and how much was compiled after the first ones."""
    import torch

    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LR, fused=True)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    sizes, before = sizes_of(given.pixels, given.buckets), compilations()
    settled = before
    found: dict[str, Any] = {"ms": [], "tokens": [], "losses": []}
    for number in range(untimed(given) + timed(given)):
        batch = make_batch(model, number, sizes[number % len(sizes)], given.rows, given.text)
        wait()
        begun = time.perf_counter()
        target = batch.pop("target")
        predicted = model(**batch, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(predicted.float(), target.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found["losses"].append(loss.item())
        wait()
        found["ms"].append(1e3 * (time.perf_counter() - begun))
        found["tokens"].append(target.shape[0] * (target.shape[1] + given.text))
        if number + 1 == SETTLED:
            settled = compilations()
    found |= {"compilations": compilations() - before, "late_compilations": compilations() - settled}
    return found | {"trainable_parameters": sum(weight.numel() for weight in weights)}


def untimed(given: argparse.Namespace) -> int:
    """Steps before those that are timed: each bucket comes twice, the first one a third time."""
    return TIMES * given.buckets + 1


def timed(given: argparse.Namespace) -> int:
    """Timed steps, as many of each bucket."""
    return -(-given.steps // given.buckets) * given.buckets


def compilations() -> int:
    """How many graphs Dynamo has handed to a compiler, in this process, of whatever system."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The row of one system, in this process."""
    import torch

    from tunecompile.cli.compare.meters import memory_figures, reset_memory

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = prepare(build(given, device), given.systems, device)
    reset_memory(device)
    try:
        found = train(model, given, device)
    except torch.OutOfMemoryError:
        return {"status": "oom"}
    if given.systems != BLOCKS and system(given.systems).engine == "tunecompile":
        import tunecompile

        print(tunecompile.report(model))
    return {"status": "ok", **figures(found, untimed(given)), **memory_figures(device)}


def run(given: argparse.Namespace, name: str, _folder: str, seconds: float) -> dict[str, Any]:
    """The row of one system, from a process of its own."""
    command = [sys.executable, __file__, "--alone", "--systems", name, "--out", str(given.out), "--mode", given.mode]
    for option in ("model", "layers", "pixels", "buckets", "rows", "text", "steps"):
        if (value := getattr(given, option)) is not None:
            command += [f"--{option}", str(value)]
    return row_apart(command, given.logs / f"diffusion-{name}.log", seconds)


def main() -> int:
    given = parse_arguments()
    os.environ |= ENVIRONMENT
    if given.alone:
        print_row(measure(given))
        return 0
    about = {"model": given.model, "mode": given.mode, "budget_gib": None, "rank": RANK, "text": given.text}
    about |= {"shape": f"{given.rows}x{'~' * (given.buckets > 1)}{given.pixels}px", "images": given.buckets}
    about |= {"layers": given.layers} if given.layers else {}
    cases = {
        name: {"system": name, "checkpointing": name != BLOCKS and bool(system(name).checkpointing), **about}
        for name in given.systems.split(",")
    }
    return run_apart(given, cases, save=lambda *_: None, run=lambda *of: run(given, *of), tell=tell)


if __name__ == "__main__":
    raise SystemExit(main())
