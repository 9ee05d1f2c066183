"""The loop of diffusers' LoRA scripts (examples/dreambooth/train_dreambooth_lora_flux.py and its siblings) on a tiny model:
accelerate, autocast, checkpointing, accumulation, an average of weights, and the adapter saved by the pipeline's class.
"""

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tunecompile
from tests.support import zoo
from tests.support.autocast import norms_as_on_a_gpu
from tests.support.models.diffusion import flux
from tests.support.notes import BROKEN, EAGER, find
from tunecompile.trainers import loops

diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState

pytestmark = pytest.mark.filterwarnings("ignore")
#: those of the script, and the MLPs
TARGETS = [f"attn.{name}" for name in ("to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_q_proj", "add_v_proj")]
TARGETS += ["attn.to_add_out", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"]
SIZES = ((8, 8), (8, 12), (12, 4), (8, 8))  # of latents: images of other aspects
BF16, EIGHT = torch.bfloat16, {"vae_scale_factor": 8}


class Run(NamedTuple):
    model: nn.Module
    losses: list[float]
    first: dict[str, Tensor]  # gradients of the first backward pass
    average: list[Tensor]


def transformer(dtype: torch.dtype, checkpointing: bool) -> nn.Module:
    torch.manual_seed(0)
    model = flux()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() < 2 else 0.0, 0.1)
    model.requires_grad_(False).to(BF16).to(dtype)
    if checkpointing:
        model.enable_gradient_checkpointing()
    model.add_adapter(peft.LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=TARGETS))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(BF16).to(parameter.dtype)
    return model.train()


def predict(model: nn.Module, height: int, width: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The predicted velocity of an image's latents and the true one."""
    draw, pipe = torch.Generator().manual_seed(seed), diffusers.FluxPipeline

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(BF16).to(dtype)

    image, noise, at = random(2, 4, height, width), random(2, 4, height, width), torch.tensor([0.25, 0.75])
    sigma = at.reshape(2, 1, 1, 1)
    noisy = ((1 - sigma) * image.float() + sigma * noise.float()).to(BF16).to(dtype)
    predicted = model(
        hidden_states=pipe._pack_latents(noisy, 2, 4, height, width),
        timestep=at,
        guidance=torch.full((2,), 3.5),
        pooled_projections=random(2, 20),
        encoder_hidden_states=random(2, 6, 24),
        txt_ids=torch.zeros(6, 3, dtype=dtype),
        img_ids=pipe._prepare_latent_image_ids(2, height // 2, width // 2, "cpu", dtype),
        return_dict=False,
    )[0]
    return pipe._unpack_latents(predicted, height=8 * height, width=8 * width, **EIGHT), noise - image


def train(door: str | None, mixed: str, wide: bool, checkpointing: bool, accumulate: int, dtype: Any = None) -> Run:
    """door: what optimizes the model. wide: adapters in fp32. dtype: of the frozen weights, where it is not `mixed`."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = accelerate.Accelerator(mixed_precision=mixed, gradient_accumulation_steps=accumulate, cpu=True)
    dtype = dtype or (BF16 if mixed == "bf16" else torch.float32)
    model = transformer(dtype, checkpointing)
    if wide:
        diffusers.training_utils.cast_training_params([model], dtype=torch.float32)
    if door == "before":
        model = tunecompile.optimize(model, executor="eager")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    if door == "run":
        loops.optimizer_made(optimizer)
    schedule = diffusers.optimization.get_scheduler("constant", optimizer=optimizer)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    if door == "after":
        model = tunecompile.optimize(model, executor="eager")
    average, losses, first = diffusers.training_utils.EMAModel(parameters, decay=0.9), [], {}
    for seed, size in enumerate(SIZES):
        with accelerator.accumulate(model):
            predicted, velocity = predict(model, *size, seed, dtype)
            loss = ((predicted.float() - velocity.float()) ** 2).reshape(2, -1).mean(1).mean()
            accelerator.backward(loss)
            first = first or {name: each.grad.clone() for name, each in zip(names, parameters)}
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            average.step(parameters)
        losses.append(loss.item())
    return Run(accelerator.unwrap_model(model), losses, first, average.shadow_params)


CASES = {
    "fp32": ("before", "no", True, False, 1),
    "bf16, adapters in fp32, checkpoints": ("after", "bf16", True, True, 2),
    "bf16": ("run", "bf16", False, False, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_loop_of_a_script(case, tmp_path, monkeypatch):
    door, *settings = CASES[case]
    monkeypatch.setattr(loops, "_door", [])
    monkeypatch.setattr(loops, "options_of_run", lambda: {"executor": "eager"})
    with norms_as_on_a_gpu():
        exact = train(None, "no", *settings[1:], dtype=torch.float32)
        plain, mine = train(None, *settings), train(door, *settings)
    theirs, ours = (Counter(zoo.errors(run.first, exact.first, 1e-3)) for run in (plain, mine))
    assert sum(ours.values()) <= 1.1 * sum(theirs.values()) + 1e-4 * len(ours)
    assert mine.losses == pytest.approx(plain.losses, rel=1e-5 if "no" in settings else 1e-2)
    assert all(torch.allclose(a.float(), b.float(), rtol=0.02, atol=2e-4) for a, b in zip(mine.average, plain.average))
    report = tunecompile.report(mine.model)
    assert {region.compiles for region in report.regions} == {1} and len(report.regions) == 2, report
    assert all(match.found == match.rewritten for match in report.matches), report
    assert not find(report, *EAGER, *BROKEN), report.notes
    assert bool(find(report, "checkpointing-is-budget")) == settings[2]
    saved(mine.model, tmp_path)


def saved(model: nn.Module, folder) -> None:
    """The adapter that the pipeline's class saves is what was trained, under eager's names."""
    layers = peft.get_peft_model_state_dict(model)
    diffusers.FluxPipeline.save_lora_weights(folder, transformer_lora_layers=layers)
    fresh = transformer(model.dtype, False)
    fresh.delete_adapters("default")
    fresh.load_lora_adapter(str(folder), prefix="transformer", weight_name="pytorch_lora_weights.safetensors")
    again = peft.get_peft_model_state_dict(fresh, adapter_name="default_0")
    assert layers and all(torch.equal(layers[name].to(each.dtype), each) for name, each in again.items())
    assert sorted(again) == sorted(layers)
