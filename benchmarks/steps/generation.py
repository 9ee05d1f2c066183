"""`generate()` of a model that trains, ms a token: transformers' own loop and recorded steps, in one process. One JSON.

    python benchmarks/steps/generation.py --model llama-3.1-8b --mode qlora --rows 8,1,64 \\
        --out benchmarks/results/generation-llama-3.1-8b-qlora.json

Random weights with adapters that are not zero, random prompts, sampled tokens, as TRL's trainers call it: bf16 autocast,
no gradients. A token's time is that of a whole call, its prompt and the recording included, by its tokens. Transformers'
loop is given fewer tokens, and its prompt does not count: the time of a short call is taken away. `apart` is how far
log-probs of the tokens as they were generated are from those of the same tokens scored by one forward, mean absolute
nats: of bf16's rounding, in both systems.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

import tunecompile
from benchmarks._jobs import DEVICE, loop_job
from benchmarks._results import write
from tunecompile.cli.compare.machine import header
from tunecompile.cli.compare.models import load_model
from tunecompile.errors import summary
from tunecompile.estimate.known_shapes import SHAPES

SHORT = 2  #: tokens of a call that is the prompt's, nearly


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--mode", choices=("qlora", "lora"), default="qlora")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", default="8", help="prompts of a call; several, separated by commas")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--tokens", type=int, default=512, help="that are generated")
    parser.add_argument("--hf-tokens", type=int, default=16, help="that transformers' loop generates: it is slow")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def settings(tokens: int, sample: bool) -> dict[str, Any]:
    """Of a call that gives each row so many tokens."""
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    return {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0, "eos_token_id": 2, **sampled}


def generate(model: nn.Module, prompts: Tensor, tokens: int, sample: bool = True, **more: Any) -> Any:
    mask = torch.ones_like(prompts)
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        return model.generate(prompts, attention_mask=mask, **settings(tokens, sample), **more)


def seconds(model: nn.Module, prompts: Tensor, tokens: int) -> float:
    """Of one call. What was generated is on the host, so the device has ended."""
    begun = time.perf_counter()
    generate(model, prompts, tokens).cpu()
    return time.perf_counter() - begun


def apart(model: nn.Module, prompts: Tensor, tokens: int = 16) -> float:
    """How far the tokens' log-probs are from those of one forward, in nats."""
    made = generate(model, prompts, tokens, sample=False, return_dict_in_generate=True, output_logits=True)
    chosen = made.sequences[:, prompts.shape[1] :, None]
    then = torch.stack(made.logits, 1).float().log_softmax(-1).gather(-1, chosen)
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        logits = model(made.sequences[:, :-1], logits_to_keep=tokens).logits
    return (logits.float().log_softmax(-1).gather(-1, chosen) - then).abs().mean().item()


def measure(model: nn.Module, prompts: Tensor, tokens: int, with_prompt: bool) -> dict[str, Any]:
    """A row's figures."""
    first = seconds(model, prompts, tokens if with_prompt else SHORT)
    held = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    calls = [seconds(model, prompts, SHORT + tokens) for _ in range(2)]
    spent, made = min(calls), SHORT + tokens
    if not with_prompt:
        spent, made = spent - seconds(model, prompts, SHORT), tokens
    row = {"status": "ok", "first_s": first, "ms_a_token": 1e3 * spent / made, "new": made, "all_s": calls}
    row |= {"tokens_per_s": len(prompts) * made / spent, "apart": apart(model, prompts)}
    if DEVICE == "cuda":
        row["beside_gib"] = (torch.cuda.max_memory_allocated() - held) / 2**30
    return row


def main() -> int:
    given = parse_arguments()
    model = load_model(loop_job(given, shapes=("2x512",))).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    vocabulary = model.get_input_embeddings().num_embeddings
    sizes = [int(rows) for rows in given.rows.split(",")]
    result: dict[str, Any] = {**header(), "report": "", "runs": []}
    cases = [(system, rows) for system in ("hf", "tunecompile") for rows in sizes]
    for place, (system, rows) in enumerate(cases):
        torch.manual_seed(rows)
        prompts = torch.randint(3, vocabulary, (rows, given.prompt), device=DEVICE)
        about = {"model": given.model, "mode": given.mode, "layers": given.layers, "system": system}
        about |= {"shape": f"{rows}x{given.prompt}+{given.tokens}"}
        if system == "tunecompile":
            tunecompile.optimize(model, executor="inductor" if DEVICE == "cuda" else "eager")
        try:
            ours = system == "tunecompile"
            row = measure(model, prompts, given.tokens if ours else given.hf_tokens, with_prompt=ours)
        except Exception as error:  # the other sizes are told
            row = {"status": f"error: {summary(error)}"}
        result["runs"].append(about | row)
        if system == "tunecompile":
            result["report"] = str(tunecompile.report(model))
        write(given.out, result, [" ".join(map(str, case)) for case in cases[place + 1 :]])
        print({**about, **row}, flush=True)
    return 0 if all(row["status"] == "ok" for row in result["runs"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
