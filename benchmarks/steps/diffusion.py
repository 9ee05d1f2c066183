"""Training steps of a diffusion transformer of diffusers: times, compilations, memory; one JSON.

    python benchmarks/steps/diffusion.py --mode qlora --pixels 1024 --buckets 10 \\
        --systems hf,hf-checkpoint,compile-blocks,tunecompile --out benchmarks/results/diffusion-flux.1-dev-qlora-10x1024px.json

    python benchmarks/steps/diffusion.py --layers 4 --pixels 512 --buckets 1 --seconds 170 --out ...
    python benchmarks/steps/diffusion.py --model wan-2.1-1.3b --pixels 640 --frames 81 --out ...

Flow matching with LoRA on the linears that diffusers' script for Flux adapts, random weights in bf16 or NF4, made where they are
used. `--buckets` counts the aspects whose images come in turn, all of about as many pixels. `compile-blocks` is diffusers'
`compile_repeated_blocks`. Each system has a process of its own, and its row is written when it ends. Without a GPU, models
whose names end in `-tiny` are for trials.
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
from tunecompile._torch.known_bugs import CUDNN_GRADIENT_LAYOUT
from tunecompile.cli.compare.spec import system
from tunecompile.estimate.denoisers import CAPTION, DENOISERS, FLUX, QWEN, TARGETS, WAN, arguments

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

RANK, LR = 16, 1e-4  #: of adapters
TIMES = 2  #: that each bucket comes before it is timed, and then again
TOKEN = 16  #: pixels of a token's edge
BLOCKS = "compile-blocks"
#: height and width in sixteenths of an image's edge, whose product is about 256
ASPECTS = ((16, 16), (18, 14), (14, 18), (19, 13), (13, 19), (21, 12), (12, 21), (24, 10), (10, 24), (17, 15))
_TINY = dict(attention_head_dim=32, num_attention_heads=2, num_layers=2)
_TINY_IMAGES = dict(_TINY, in_channels=16, joint_attention_dim=24, axes_dims_rope=(8, 12, 12))
#: model -> its class, and its config where that differs from the class's own
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **DENOISERS,
    "flux-tiny": (FLUX, dict(_TINY_IMAGES, guidance_embeds=True, num_single_layers=2, pooled_projection_dim=20)),
    "qwen-image-tiny": (QWEN, dict(_TINY_IMAGES, out_channels=4)),
    "wan-tiny": (WAN, dict(_TINY, in_channels=4, out_channels=4, text_dim=24, ffn_dim=128)),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="flux.1-dev")
    parser.add_argument("--mode", choices=("lora", "qlora"), default="lora", help="the frozen weights: bf16, or NF4")
    parser.add_argument("--layers", type=int, help="at least 2; of Flux joint ones, and twice as many single")
    parser.add_argument("--pixels", type=int, default=1024, help="of a square image's edge")
    parser.add_argument("--buckets", type=int, default=1, choices=range(1, len(ASPECTS) + 1), metavar="1..10")
    parser.add_argument("--frames", type=int, default=1, help="of a video")
    parser.add_argument("--rows", type=int, default=1, help="images or videos of a batch")
    parser.add_argument("--text", type=int, default=CAPTION, help="tokens of a caption")
    parser.add_argument(
        "--cudnn",
        action=argparse.BooleanOptionalAction,
        help="torch's attention by cuDNN, in all systems; by default in ours alone while torch has the fault by which the "
        "others' gradients are wrong, or end in an illegal access to memory (tunecompile doctor tells it)",
    )
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


def build(given: argparse.Namespace, device: str, dtype: torch.dtype) -> nn.Module:
    """The model of random weights with adapters, the same for all systems."""
    import diffusers
    import torch
    from peft import LoraConfig

    kind, config = MODELS[given.model]
    if given.layers:
        config = (
            config | {"num_layers": given.layers} | ({"num_single_layers": 2 * given.layers} if kind == FLUX else {})
        )
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = getattr(diffusers, kind)(**config)
        if given.mode == "qlora":
            pack(model, dtype)
        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, init_lora_weights="gaussian", target_modules=[*TARGETS]))
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model.train()


def pack(model: nn.Module, dtype: torch.dtype) -> None:
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


def make_batch(model: nn.Module, number: int, size: tuple[int, int], given: argparse.Namespace) -> tuple[dict, Tensor]:
    """What the model is called with: noisy latents and their captions; and the velocity that is to be predicted."""
    import torch

    parameter = next(model.parameters())
    generator = torch.Generator(parameter.device).manual_seed(number)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=parameter.device, dtype=parameter.dtype)

    inputs = arguments(model, given.rows, (latent_frames(given), *size), given.text, random)
    time = torch.rand(given.rows, generator=generator, device=parameter.device)
    inputs["timestep"] = 1000 * time if MODELS[given.model][0] == WAN else time
    if "guidance" in inputs:
        inputs["guidance"] = torch.full_like(time, 3.5)
    return inputs, random(*inputs["hidden_states"].shape)


def latent_frames(given: argparse.Namespace) -> int:
    """A quarter of the frames behind the first one are tokens."""
    return 1 + (given.frames - 1) // 4


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


def steps(model: nn.Module, given: argparse.Namespace) -> Iterator[tuple[Callable[[], Tensor], int]]:
    """The loss of each step, and its tokens: the aspects come in turn."""
    import torch

    sizes = sizes_of(given.pixels, given.buckets)
    for number in range(untimed(given) + timed(given)):
        height, width = size = sizes[number % len(sizes)]
        batch, target = make_batch(model, number, size, given)

        def loss(batch: dict[str, Any] = batch, target: Tensor = target) -> Tensor:
            predicted = model(**batch, return_dict=False)[0]
            return torch.nn.functional.mse_loss(predicted.float(), target.float())

        yield loss, given.rows * (latent_frames(given) * height * width + given.text)


def untimed(given: argparse.Namespace) -> int:
    """Steps before those that are timed: each bucket comes twice, the first one a third time."""
    return TIMES * given.buckets + 1


def timed(given: argparse.Namespace) -> int:
    """Timed steps, as many of each bucket."""
    return -(-given.steps // given.buckets) * given.buckets


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The row of one system, in this process."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.backends.cuda.enable_cudnn_sdp(by_cudnn(given, given.systems))
    model = prepare(build(given, device, dtype), given.systems, device)
    row = train(model, steps(model, given), untimed(given), LR, device)
    if given.systems != BLOCKS and system(given.systems).engine == "tunecompile" and row["status"] == "ok":
        import tunecompile

        print(tunecompile.report(model))
    return row


def by_cudnn(given: argparse.Namespace, name: str) -> bool:
    """Whether a system may use cuDNN's attention."""
    if given.cudnn is not None:
        return given.cudnn
    return not CUDNN_GRADIENT_LAYOUT.present or (name != BLOCKS and system(name).engine == "tunecompile")


def run(given: argparse.Namespace, name: str, _folder: str, seconds: float) -> dict[str, Any]:
    """The row of one system, from a process of its own."""
    options = ("model", "mode", "layers", "pixels", "buckets", "frames", "rows", "text", "steps")
    more = "--alone", "--cudnn" if by_cudnn(given, name) else "--no-cudnn"
    return system_apart(given, __file__, name, options, seconds, *more)


def main() -> int:
    given = parse_arguments()
    os.environ |= ENVIRONMENT
    if given.alone:
        print_row(measure(given))
        return 0
    about = {"model": given.model, "mode": given.mode, "budget_gib": None, "rank": RANK, "text": given.text}
    about |= {"shape": f"{given.rows}x{'~' * (given.buckets > 1)}{given.pixels}px", "images": given.buckets}
    about |= {"frames": given.frames} if given.frames > 1 else {}
    about |= {"layers": given.layers} if given.layers else {}
    cases = {
        name: {"system": name, "checkpointing": name != BLOCKS and bool(system(name).checkpointing)}
        | {"attention": "cudnn" if by_cudnn(given, name) else "without cuDNN", **about}
        for name in given.systems.split(",")
    }
    return run_apart(given, cases, save=lambda *_: None, run=lambda *of: run(given, *of), tell=tell)


if __name__ == "__main__":
    raise SystemExit(main())
