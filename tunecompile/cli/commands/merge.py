"""`tunecompile merge`: an adapter and its base as one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Optional

import typer
from rich.console import Console

from tunecompile.cli.options import escape, exit_code
from tunecompile.errors import need
from tunecompile.integrations.export.adapter import BASES, load
from tunecompile.integrations.export.gguf import save_gguf
from tunecompile.integrations.export.safetensors import empty, save_merged


def merge(
    adapter: Annotated[Path, typer.Argument(help="The folder that save_pretrained of the PEFT model wrote.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    base: Annotated[
        Optional[str], typer.Option(help="A folder or a hub id, in place of the base that the adapter names.")
    ] = None,
    trained_on: Annotated[
        Literal[tuple(BASES)],  # pyright: ignore[reportInvalidTypeForm]
        typer.Option(
            help="How the base was quantised in training: plain (as it is stored), nf4, nf4-double, nf4-experts (as "
            "tunecompile.nf4_config loads it), mxfp4-experts or fp8-experts (packed_config), fp4 or int8. With the "
            "right value the result is nearest to the trained model."
        ),
    ] = "plain",
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], typer.Option(help="Of the weights.")] = "bfloat16",
    gguf: Annotated[
        bool,
        typer.Option("--gguf", help="Also write OUT/model.gguf for llama.cpp: Llama, Mistral, Qwen2 and Qwen3 only."),
    ] = False,
) -> None:
    """Write an adapter and its base as one model: safetensors, configuration and tokenizer."""

    def work() -> int:
        if gguf:
            need("--gguf", "gguf", "gguf")
        empty(out)  # fails here rather than after a large model is loaded
        model, tokenizer = load(adapter, base, trained_on)
        save_merged(model, out, dtype, tokenizer)
        if gguf:
            save_gguf(out)
        Console().print(f"The model: {escape(str(out))}", highlight=False, soft_wrap=True)
        return 0

    raise typer.Exit(exit_code(work))
