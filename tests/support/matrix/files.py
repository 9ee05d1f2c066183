"""How models come from files and go into them: every way to load one that is too big to be loaded whole, and all that is saved of what was trained. A cell each (see `cells.py`)."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.matrix.cells import DEVICE, Cell, Make, eight_bit, four_bit, lora, small
from tests.support.matrix.runs import Outcome
from tests.support.matrix.trainers import WHOLE, inputs_of, loop

# -- loading ---------------------------------------------------------------------------------------------------------------


@functools.cache
def checkpoint() -> tempfile.TemporaryDirectory:
    """Several shards; and room for what waits on the disk."""
    from tests.support.files import save_shards

    made = tempfile.TemporaryDirectory()
    save_shards(made.name)
    return made


def from_shards(told: str, adapter: dict | None = None, **names: Any) -> Make:
    """Loaded by the lines of the docs that say so, then adapted."""

    def build() -> nn.Module:
        from tests.support.files import loaded

        folder = checkpoint().name
        return zoo.adapt(loaded(told, path=folder, folder=f"{folder}/offloaded", **names), **(adapter or {}))

    return build


def on_two_gpus() -> nn.Module:
    if torch.cuda.device_count() < 2:
        pytest.skip("not here: it needs two GPUs")
    parts = (
        "model.embed_tokens",
        "model.rotary_emb",
        "model.layers.0",
        "model.layers.1",
        "model.layers.2",
        "model.norm",
        "lm_head",
    )
    return from_shards(
        "device_map=placement", placement={part: int(i > 2) for i, part in enumerate(parts)}, room=None
    )()


def by_transformers(**options: Any) -> Make:
    def build() -> nn.Module:
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        return zoo.adapt(
            AutoModelForCausalLM.from_pretrained(
                checkpoint().name,
                quantization_config=BitsAndBytesConfig(**options),
                dtype=torch.float32,
                device_map={"": DEVICE},
            )
        )

    return build


ROOM = {"cpu": "1GB"} | ({0: "1GB"} if DEVICE == "cuda" else {})
LITTLE = {"cpu": "500KB"} if DEVICE == "cpu" else {0: "500KB", "cpu": "1KB"}
LOADING: dict[str, Make] = {
    "onto one device": from_shards("device_map=placement", placement={"": DEVICE}, room=None),
    **{
        f'device_map="{kind}", with max_memory': from_shards("device_map=placement", placement=kind, room=ROOM)
        for kind in ("auto", "balanced", "balanced_low_0", "sequential")
    },
    "layers on two GPUs": on_two_gpus,
    "layers on the disk (offload_folder)": from_shards(
        "offload_folder=folder", dict(target_modules=["q_proj", "v_proj"], layers_to_transform=[0]), room=LITTLE
    ),
    "shards in NF4": from_shards("load_in_4bit=True", device=DEVICE),
    "shards in 8 bits": by_transformers(load_in_8bit=True),
}

# -- saving ----------------------------------------------------------------------------------------------------------------


def saved(read: Callable[[nn.Module, Path], nn.Module], limit: float = 1e-5) -> Callable[[Make, Path], Outcome]:
    """`read` saves what was trained, and returns it as it is loaded again: its logits are off by `limit` at most."""

    def run(make: Make, folder: Path) -> Outcome:
        from tests.support.files import distance, logits

        numbers, model = loop(steps=2)(make, folder)
        again = read(model, folder / "saved").to(DEVICE)
        assert distance(logits(again, inputs_of(50)), logits(model, inputs_of(50))) < limit
        with torch.no_grad():
            return numbers | {"loss of what was loaded": again(**inputs_of(50)).loss.item()}, model

    return run


def adapter(model: nn.Module, folder: Path) -> nn.Module:
    from peft import PeftModel

    model.save_pretrained(folder)
    return PeftModel.from_pretrained(small(), folder)


def adapter_for_vllm(model: nn.Module, folder: Path) -> nn.Module:
    from tests.support.files import read_as_by_vllm

    made = adapter(model, folder)
    read_as_by_vllm(folder, layers=2)
    return made


def merged(dtype: str) -> Callable[[nn.Module, Path], nn.Module]:
    def read(model: nn.Module, folder: Path) -> nn.Module:
        from transformers import AutoModelForCausalLM

        tunecompile.save_merged(model, folder, dtype)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    return read


def by_gguf(model: nn.Module, folder: Path) -> nn.Module:
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM

    from tests.support.tokenizers import byte_level

    tunecompile.save_merged(model, folder, "float32", byte_level())
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=tunecompile.save_gguf(folder).name)


def whole(model: nn.Module, folder: Path) -> nn.Module:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def by_state_dict(model: nn.Module, folder: Path) -> nn.Module:
    """Into a model that was never optimized: names and values are its own."""
    folder.mkdir(parents=True)
    torch.save(model.state_dict(), folder / "state.pt")
    made = small()
    made.load_state_dict(torch.load(folder / "state.pt"))
    return made


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ROUNDED = 1e-2  #: of bfloat16, whose weights are off by 0.4 % at most
SAVING: dict[str, dict] = {
    "an adapter": dict(run=saved(adapter)),
    "an adapter for vLLM": dict(build=lora(use_rslora=True, target_modules=LINEARS), run=saved(adapter_for_vllm)),
    "all weights": dict(build=WHOLE, run=saved(whole)),
    "state_dict": dict(build=WHOLE, run=saved(by_state_dict)),
    "merged": dict(run=saved(merged("float32"))),
    "merged, bfloat16": dict(run=saved(merged("bfloat16"), ROUNDED)),
    "merged, float16": dict(run=saved(merged("float16"), ROUNDED)),
    "merged from NF4": dict(build=lora(base=four_bit()), run=saved(merged("float32"))),
    "merged from NF4, bfloat16": dict(build=lora(base=four_bit()), run=saved(merged("bfloat16"), ROUNDED)),
    "merged from 8 bits": dict(build=lora(base=eight_bit), run=saved(merged("float32"), ROUNDED)),
    "merged, as GGUF": dict(build=lora(model={"vocab_size": 320}), run=saved(by_gguf)),
}
CELLS = [
    *(Cell("loading", name, build) for name, build in LOADING.items()),
    *(Cell("saving", name, **{"build": lora(), **what}) for name, what in SAVING.items()),
]
