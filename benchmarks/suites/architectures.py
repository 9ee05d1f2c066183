"""Every causal language model of the installed transformers, optimized: loss and gradients of a step beside the model's own.

    python benchmarks/suites/architectures.py --out benchmarks/results/architectures.json
    python benchmarks/suites/architectures.py --only llama,jamba --modes full --out /tmp/two.json

Each architecture is made small (two layers, if it can be) from its default config, with random weights, on a CPU in fp32, op by op; trained as a whole, and by adapters in
all linears. Random numbers are off where the config has a number for that: compiled code draws them in another order. From the repository's root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

import tunecompile
from tests.support import zoo
from tunecompile.cli.compare.machine import header

ENOUGH = 1e-5  #: difference of any gradient over the norm of all, in fp32
SECONDS = 120  #: for one architecture in one mode
LARGEST = 150e6  #: parameters
ROWS, LENGTH = 2, 24
SMALL: dict[str, Any] = {  #: of config attributes that an architecture has
    **dict.fromkeys(
        (
            "hidden_size",
            "n_embd",
            "d_model",
            "word_embed_proj_dim",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
        ),
        64,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "ffn_hidden_size",
            "max_position_embeddings",
        ),
        128,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "decoder_layers",
            "encoder_layers",
            "num_experts_per_tok",
            "num_key_value_heads",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "kv_lora_rank",
            "q_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "state_size",
            "mamba_d_head",
            "mamba_d_state",
            "linear_key_head_dim",
            "linear_value_head_dim",
        ),
        16,
    ),
    **dict.fromkeys(
        ("n_group", "topk_group", "first_k_dense_replace", "n_groups", "mamba_n_groups", "bos_token_id"), 1
    ),
    "vocab_size": 256,
    "qk_head_dim": 32,
    "sliding_window": 32,
    "num_heads": 8,
    "mamba_n_heads": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
FORMS: tuple[dict[str, Any], ...] = (  #: of what does not fit together in some of them; None: the config's own
    {},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 4, "head_dim": 32},
    {"num_key_value_heads": 4, "head_dim": 8},
    {"rotary_dim": 8},
    {"head_dim": None},
    {"head_dim": None, "num_attention_heads": None, "num_key_value_heads": None},
    {"mamba_n_heads": 16, "mamba_d_head": 8, "attn_layer_indices": [0]},
    {"mamba_n_heads": 4, "mamba_d_ssm": 64},
    {"use_cache": False},
    {"num_hidden_layers": 4, "use_cache": False},
    {"num_hidden_layers": None, "use_cache": False},
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), help="all, if not given")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["full", "lora"])
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="at a time")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def shrink(config: Any, sizes: dict[str, Any], depth: int = 0) -> None:
    """The config and those inside, and no random numbers."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and depth < 2:
            shrink(value, sizes, depth + 1)
        elif isinstance(value, float) and any(word in name for word in ("drop", "jitter")):
            setattr(config, name, 0.0)
        elif (
            isinstance(value, list)
            and len(value) > 2
            and name in ("layer_types", "layers_block_type", "mlp_layer_types")
        ):
            with contextlib.suppress(Exception):
                setattr(config, name, (list(dict.fromkeys(value)) * 2)[:2])
    for name, value in sizes.items():
        with contextlib.suppress(Exception):  # some attributes are each layer's, or follow from others
            if value is not None and not isinstance(getattr(config, name, None), (list, dict, type(None))):
                setattr(config, name, value)


def make(name: str) -> nn.Module:
    """The first form that can take a step.

    Raises:
        RuntimeError: none can.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    why = ""
    for form in FORMS:
        try:
            torch.manual_seed(0)
            config = CONFIG_MAPPING[name]()
            shrink(config, {**SMALL, **form})
            if "use_cache" in form:
                config.use_cache = False
            with torch.device("meta"):
                if sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters()) > LARGEST:
                    raise RuntimeError("too large")
            model = AutoModelForCausalLM.from_config(config).float().train()
            step(model)
            return model
        except Exception as error:  # of any kind: the config is none that its authors had in mind
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
    raise RuntimeError(why)


def step(model: nn.Module, length: int = LENGTH) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(1)
    ids = torch.randint(3, 250, (ROWS, length))
    loss, gradients = zoo.step(model, {"input_ids": ids, "labels": ids})
    return loss.item(), gradients


class Late(BaseException):
    """Of the alarm; nobody else's handler catches it."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Late

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def compared(case: tuple[str, str]) -> dict[str, Any]:
    """One architecture in one mode: its row."""
    name, mode = case
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    row = {"architecture": name, "mode": mode}
    try:
        with at_most(SECONDS):
            model = make(name)
            model = zoo.adapt(model).train() if mode == "lora" else model
            loss, gradients = step(model)
    except (Exception, Late) as error:
        return row | {"status": "not made", "reason": f"{error}" or type(error).__name__}
    try:
        with at_most(SECONDS):
            torch._dynamo.reset()
            tunecompile.optimize(model, executor="eager")
            ours, found = step(model)
            step(model, LENGTH - 7)
    except (Exception, Late) as error:
        return row | {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}
    report = tunecompile.report(model)
    norm = sum(gradient.norm().item() ** 2 for gradient in gradients.values()) ** 0.5
    error = (
        max((found[key] - gradient).norm().item() for key, gradient in gradients.items()) / norm
        if found.keys() == gradients.keys()
        else float("inf")
    )
    same = error < ENOUGH and abs(ours - loss) < ENOUGH * abs(loss)
    return row | {
        "status": "same" if same else "differs",
        "error": error,
        "losses": [loss, ours],
        "rewritten": sum(m.rewritten for m in report.matches),
        "found": sum(m.found for m in report.matches),
        "compiled": report.compiles > 0,
        "notes": [re.sub(r"/\S+/site-packages/", "", note) for note in report.notes],
    }


def main() -> int:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    given = parse_arguments()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    cases = [(name, mode) for name in given.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) for mode in given.modes]
    result = {**header(), "shape": f"{ROWS}x{LENGTH}", "runs": []}
    with multiprocessing.get_context("spawn").Pool(given.processes, maxtasksperchild=40) as pool:
        for row in pool.imap(compared, cases):
            result["runs"].append(row)
            given.out.write_text(json.dumps(result, indent=1) + "\n")
            said = (
                row.get("reason")
                or f"gradients off by {row['error']:.1e}, {row['rewritten']} of {row['found']} patterns rewritten"
            )
            print(f"{row['architecture']:28s}{row['mode']:6s}{row['status']:10s}{said}", flush=True)
    print(dict(Counter(row["status"] for row in result["runs"])))
    return 1 if any(row["status"] in ("failed", "differs") for row in result["runs"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
