"""What is found in one layer of each family under LoRA: a table for each major version of transformers, and what differs within one.

    python -m tests.models.golden    # prints the table of the installed versions

A model whose code changes upstream, or a torch that traces it otherwise, shows as a difference from its row, with the report's reasons.
"""

from __future__ import annotations

import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.models import mixtures
from tunecompile._torch.known_bugs import GROUPED_MM_IN_FP32, installed
from tunecompile.report.report import Report

Row = dict[str, tuple[int, int]]  #: pass -> (found, rewritten)

ADAPTED = {"linear_cross_entropy": (1, 1), "lora": (7, 7), "grouped_linear": (5, 5)}
NARROW = {
    "linear_cross_entropy": (1, 1),
    "lora": (6, 6),
    "grouped_linear": (3, 3),
}  #: an MLP of two linears, or whose first are one
JOINED = {"linear_cross_entropy": (1, 1), "lora": (4, 4)}  #: queries, keys and values are one linear
LLAMA = ADAPTED | {"rms_norm": (2, 2), "add_rms_norm": (1, 1), "rope": (2, 2), "swiglu": (1, 1)}
NORMS = {"layer_norm": (2, 2), "add_layer_norm": (1, 1)}

#: both products, ways there and back, and of routing weights
EXPERTS = {"experts": (2, 2), "expert_rows": (3, 3), "sort_keys": (1, 1), "weighted_gate": (1, 1)}
EXPERTS_TWICE = {
    "experts": (4, 4),
    "expert_rows": (6, 6),
    "sort_keys": (2, 2),
    "weighted_gate": (2, 2),
}  #: in two layers
MOE = LLAMA | EXPERTS | {"lora": (4, 4), "grouped_linear": (3, 3)}
#: a bias is weighted, too
GPT_OSS = {name: count for name, count in MOE.items() if name != "weighted_gate"}

GOLDEN: dict[int, dict[str, Row]] = {
    5: {  #: by transformers' major version, and family
        **dict.fromkeys(
            ("llama", "mistral", "qwen2", "granite", "smollm3", "seed_oss", "ministral", "gemma", "helium", "ernie4_5"),
            LLAMA,
        ),
        **dict.fromkeys(
            ("olmo2", "olmo3", "exaone4"), ADAPTED | {"rms_norm": (4, 4), "rope": (2, 2), "swiglu": (1, 1)}
        ),
        "qwen3": LLAMA | {"rms_norm": (4, 4)},
        # two kinds of layers: with attention, and with a convolution or a delta rule in its place
        "lfm2": LLAMA
        | {"lora": (12, 12), "grouped_linear": (7, 7), "swiglu": (2, 2), "rms_norm": (6, 6)}
        | {"add_rms_norm": (2, 2)},
        "qwen3_5": LLAMA
        | {"lora": (15, 15), "grouped_linear": (10, 10), "swiglu": (3, 3), "rms_norm": (7, 7)}
        | {"add_rms_norm": (2, 2)},
        **dict.fromkeys(("cohere", "cohere2"), ADAPTED | {"layer_norm": (1, 1), "rope": (2, 2), "swiglu": (1, 1)}),
        "gemma2": LLAMA | {"rms_norm": (4, 4), "document_attention": (1, 1)},  # written out, with a soft-cap
        "gemma3": LLAMA | {"rms_norm": (6, 6)},
        "gemma4": LLAMA | {"rms_norm": (7, 7)},  # values have a norm, too
        "hunyuan": LLAMA | {"rms_norm": (4, 4)},  # normed once it is rotated
        "phi3": {name: count for name, count in LLAMA.items() if name != "grouped_linear"}
        | {"lora": (4, 4)},  # its siblings are one linear
        "glm": NARROW | {"rms_norm": (2, 2), "add_rms_norm": (1, 1), "rope": (2, 2), "swiglu": (1, 1)},
        "glm4": NARROW | {"rms_norm": (4, 4), "add_rms_norm": (1, 1), "rope": (2, 2), "swiglu": (1, 1)},
        "starcoder2": NARROW | NORMS | {"rope": (2, 2)},
        "stablelm": ADAPTED | NORMS | {"rope": (2, 2), "swiglu": (1, 1)},
        "nemotron": NARROW | NORMS | {"rope": (2, 2)},
        "arcee": NARROW | {"rms_norm": (2, 2), "add_rms_norm": (1, 1), "rope": (2, 2)},
        "apertus": NARROW | {"rms_norm": (4, 4), "add_rms_norm": (1, 1), "rope": (2, 2)},
        "opt": NARROW | {"layer_norm": (2, 2)},  # its sums are of rows, and views of them
        **dict.fromkeys(("qwen3_moe", "olmoe"), MOE | {"rms_norm": (4, 4)}),
        "mixtral": MOE,
        "gpt_oss": GPT_OSS | {"document_attention": (1, 1), "expert_biases": (2, 2)},  # its attention is written out
        "qwen2_moe": LLAMA
        | EXPERTS
        | {"lora": (8, 8), "swiglu": (2, 2)},  # a shared expert and its gate beside the attention's
        # two kinds of layers: the first is dense
        "glm4_moe": ADAPTED
        | EXPERTS
        | {
            "lora": (8, 8),
            "grouped_linear": (6, 6),
            "rope": (4, 4),
            "rms_norm": (4, 4),
            "add_rms_norm": (2, 2),
            "swiglu": (3, 3),
        },
        **dict.fromkeys(
            ("deepseek_v2", "deepseek_v3"),
            ADAPTED
            | EXPERTS
            | {
                "lora": (10, 10),
                "grouped_linear": (4, 4),
                "rope": (4, 4),
                "rms_norm": (8, 8),
                "add_rms_norm": (2, 2),
                "swiglu": (3, 3),
            },
        ),
        "llama4": LLAMA | {"rms_norm": (4, 4)},
        "phi": ADAPTED | {"lora": (6, 6), "grouped_linear": (4, 4), "rope": (2, 2), "layer_norm": (1, 1)},
        "gpt_neox": {
            "linear_cross_entropy": (1, 1),
            "lora": (4, 4),
            "rope": (2, 2),
            "layer_norm": (2, 2),
        },
        "gpt2": NORMS
        | {"linear_cross_entropy": (1, 1), "lora": (4, 4)},  # its linears hold their weights the other way round
        # written out, whose weights are returned
        **dict.fromkeys(("mpt", "bloom"), NORMS | JOINED | {"attention": (1, 1)}),
        "gpt_neo": NORMS | NARROW | {"attention": (1, 1)},
        "gptj": NARROW | {"document_attention": (1, 1), "rope": (2, 2), "layer_norm": (1, 1)},
        "codegen": JOINED | {"document_attention": (1, 1), "rope": (2, 2), "layer_norm": (1, 1)},
        "falcon": {
            "linear_cross_entropy": (1, 1),
            "lora": (4, 4),
            "rope": (2, 2),
            "layer_norm": (2, 2),
        },  # a product with a transposed weight
    }
}

ADAPTED_4BIT = {"nf4": (4, 4), "lora": (4, 4), "grouped_linear": (3, 3)}
MOE_4BIT = MOE | ADAPTED_4BIT
SHARED_4BIT = MOE | {"swiglu": (2, 2)}  #: a shared expert beside
LATENT_4BIT = SHARED_4BIT | {"nf4": (8, 8), "lora": (5, 5), "grouped_linear": (2, 2), "rms_norm": (4, 4)}
HYBRID_4BIT = MOE | EXPERTS_TWICE | {"swiglu": (5, 5), "rms_norm": (7, 7)}

#: mixtures with linears and experts in 4 bits under adapters on linears: by the names of `tests.support.models.mixtures`
IN_4BIT: dict[str, Row] = {
    "mixtral": MOE_4BIT,
    "granitemoe": MOE_4BIT,
    **dict.fromkeys(("qwen3_moe", "olmoe"), MOE_4BIT | {"rms_norm": (4, 4)}),
    "gpt_oss": GPT_OSS | ADAPTED_4BIT | {"document_attention": (1, 1), "expert_biases": (2, 2)},
    "qwen2_moe": SHARED_4BIT | {"nf4": (8, 8), "lora": (8, 8), "grouped_linear": (5, 5)},
    "glm4_moe": SHARED_4BIT | {"nf4": (7, 7), "lora": (4, 4)},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), LATENT_4BIT),
    "qwen3_next": HYBRID_4BIT | {"nf4": (15, 15), "lora": (9, 9), "add_rms_norm": (2, 2)},
    "qwen3_5_moe": HYBRID_4BIT
    | {"nf4": (17, 17), "lora": (17, 17), "grouped_linear": (10, 10), "add_rms_norm": (2, 2)},
}


def _without(pattern: str, *families: str) -> dict[str, Row]:
    return {
        family: {name: count for name, count in GOLDEN[5][family].items() if name != pattern} for family in families
    }


#: (from which version of transformers on, before which one, rows that are otherwise there)
OTHERWISE: tuple[tuple[tuple[int, int], tuple[int, int], dict[str, Row]], ...] = (
    ((5, 0), (5, 1), _without("document_attention", "gemma2")),
    # their padding stays; CodeGen's weights are returned whether they are requested or not
    ((5, 0), (5, 1), {"gptj": _without("document_attention", "gptj")["gptj"] | {"attention": (1, 1)}}),
    ((5, 0), (5, 1), {"codegen": _without("document_attention", "codegen")["codegen"] | {"attention": (1, 0)}}),
    # no longer written out: they call `scaled_dot_product_attention`
    ((5, 24), (6, 0), _without("document_attention", "gptj", "codegen")),
)

#: where layers with experts run eagerly in fp32: what is found in the others
EAGER_EXPERTS: dict[str, Row] = {
    **dict.fromkeys(("qwen3_moe", "olmoe", "mixtral", "gpt_oss", "qwen2_moe"), {"linear_cross_entropy": (1, 1)}),
    "glm4_moe": LLAMA,
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3"), LLAMA | {"lora": (8, 8), "grouped_linear": (4, 4), "rms_norm": (4, 4)}
    ),
}


HEARS = LLAMA | {"lora": (13, 13), "grouped_linear": (7, 7), "layer_norm": (2, 2), "add_layer_norm": (1, 1)}
#: models of speech under adapters on encoder and decoder: by the names of `tests.support.models.speech`
SPEECH: dict[str, Row] = {
    "whisper": {
        "linear_cross_entropy": (1, 1),
        "lora": (16, 16),
        "grouped_linear": (4, 4),
        "layer_norm": (5, 5),
        "add_layer_norm": (3, 3),
    },
    "voxtral": HEARS,
    "qwen2_audio": HEARS | {"linear_cross_entropy": (1, 0)},  # its loss takes rows out of the logits
    "qwen2_5_omni": HEARS | {"document_attention": (1, 1)},
}


def experts_run_eagerly() -> bool:
    """Whether torch refuses grouped products in fp32, and transformers has no op of its own for them yet."""
    return installed("transformers") < (5, 3) and GROUPED_MM_IN_FP32.present


def counts(**found: int) -> Row:
    """A row of what is all rewritten, beside the loss."""
    return {"linear_cross_entropy": (1, 1), **{name: (count, count) for name, count in found.items()}}


#: hybrids with one layer of each kind, or two, under adapters with dropout, which have no MLP as a whole:
#: by the names of `tests.support.models.hybrids`
HYBRIDS: dict[str, Row] = {
    "qwen3_5": counts(lora=14, grouped_linear=10, swiglu=3, rms_norm=7, add_rms_norm=2, rope=2, document_attention=1)
    | {"lora_mlp": (2, 0)},
    "qwen3_5_moe": counts(
        lora=16, grouped_linear=10, swiglu=5, rms_norm=7, add_rms_norm=2, rope=2, document_attention=1
    )
    | EXPERTS_TWICE
    | {"lora_mlp": (2, 0)},
    "qwen3_next": counts(lora=8, grouped_linear=3, swiglu=5, rms_norm=7, add_rms_norm=2, rope=2, document_attention=1)
    | EXPERTS_TWICE,
    "olmo_hybrid": counts(
        lora=17, grouped_linear=12, swiglu=3, rms_norm=7, add_rms_norm=1, rope=2, document_attention=1
    )
    | {"lora_mlp": (2, 0)},
    "kimi_linear": counts(lora=19, grouped_linear=12, swiglu=3, rms_norm=6, add_rms_norm=2, document_attention=1)
    | EXPERTS
    | {"lora_mlp": (2, 0)},
    "lfm2": counts(lora=10, grouped_linear=7, swiglu=2, rms_norm=6, add_rms_norm=2, rope=2, document_attention=1)
    | {"lora_mlp": (2, 0)},
    "lfm2_moe": counts(lora=7, grouped_linear=5, swiglu=2, rms_norm=6, add_rms_norm=2, rope=2, document_attention=1)
    | EXPERTS
    | {"lora_mlp": (1, 0)},
    "lfm3": counts(lora=12, grouped_linear=8, swiglu=2, rms_norm=10, add_rms_norm=2, rope=2, document_attention=1)
    | {"lora_mlp": (2, 0)},
    "bamba": counts(lora=11, grouped_linear=7, swiglu=3, rms_norm=5, add_rms_norm=2, rope=2, document_attention=1)
    | {"lora_mlp": (2, 0)},
    "granite_hybrid": counts(
        lora=9, grouped_linear=3, swiglu=3, rms_norm=5, add_rms_norm=2, rope=2, document_attention=1
    )
    | {"lora_mlp": (2, 0)},
    "granite_hybrid_moe": counts(
        lora=9, grouped_linear=3, swiglu=5, rms_norm=5, add_rms_norm=2, rope=2, document_attention=1
    )
    | EXPERTS_TWICE
    | {"lora_mlp": (2, 0)},
    "falcon_h1": counts(lora=8, grouped_linear=3, swiglu=2, rms_norm=2, add_rms_norm=1, rope=2, document_attention=1)
    | {"lora_mlp": (1, 0)},
    "nemotron_h": counts(lora=7, grouped_linear=3, swiglu=1, rms_norm=4, document_attention=1),
    "nemotron_h_moe": counts(
        lora=7, grouped_linear=3, swiglu=1, rms_norm=4, document_attention=1, experts=2, expert_rows=3, sort_keys=1
    ),
    "mamba2": counts(lora=1, swiglu=1, rms_norm=2),
    "zamba2": counts(grouped_linear=3, swiglu=3, rms_norm=6, add_rms_norm=1, document_attention=1) | {"lora": (10, 9)},
    "mamba": counts(lora=2, swiglu=1, rms_norm=1),
    "falcon_mamba": counts(lora=2, swiglu=1, rms_norm=4),
    "jamba": counts(lora=12, grouped_linear=7, swiglu=3, rms_norm=7, add_rms_norm=2, document_attention=1)
    | {"lora_mlp": (2, 0)},
    "zamba": counts(lora=10, grouped_linear=5, swiglu=5, rms_norm=4, add_rms_norm=1, document_attention=1)
    | {"lora_mlp": (1, 0)},
}


def expected(family: str) -> tuple[Row, bool]:
    """(its row for the installed versions, whether its layers run eagerly).

    Raises:
        KeyError: there is no table yet for this major version of transformers.
    """
    transformers = installed("transformers")
    if family in EAGER_EXPERTS and experts_run_eagerly():
        return EAGER_EXPERTS[family], True
    for since, before, rows in OTHERWISE:
        if family in rows and since <= transformers < before:
            return rows[family], False
    return GOLDEN[int(transformers.partition(".")[0])][family], False


def adapted(family: str) -> nn.Module:
    """A small model under adapters."""
    return zoo.adapt(zoo.make(family))


def in_4bit(family: str) -> nn.Module:
    """A mixture with linears and experts in 4 bits, and adapters on linears."""
    model = mixtures.make(family)
    tunecompile.quantize_experts(model)
    return zoo.adapt(zoo.quantize(model))


def table(model: nn.Module) -> tuple[Row, float, Report]:
    """(what is found in a model, the worst gradient's distance to eager's, the report)."""
    torch._dynamo.reset()
    inputs = zoo.batch()
    _, expected = zoo.step(model, inputs)
    _, got = zoo.step(tunecompile.optimize(model, executor="eager"), inputs)
    report = tunecompile.report(model)
    return (
        {m.family: (m.found, m.rewritten) for m in report.matches if m.found},
        max(zoo.errors(got, expected).values()),
        report,
    )


if __name__ == "__main__":
    import transformers

    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    for name, make in [*((name, adapted) for name in zoo.NAMES), *((name, in_4bit) for name in IN_4BIT)]:
        found, error, _ = table(make(name))
        print(
            f"{name:12s} {error:.1e}  "
            + "  ".join(f"{family} {rewritten}/{of}" for family, (of, rewritten) in found.items()),
            flush=True,
        )
