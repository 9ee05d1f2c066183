"""Steps of models beside eager's, a row each: families, kinds of attention and of layers, adapters, collators, sizes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from tests.support import zoo
from tests.support.batches import documents, packed, padded
from tests.support.models import hybrids
from tests.support.models.pairs import attending, optimized, without_mlps
from tests.support.rounding import kernels_have_windows, waited_for, whole
from tests.support.runs import EXACT, Run, cases, checkpoints, unwrapped
from tunecompile.runtime.unpad.rounding import rounding

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
OFF = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "num_hidden_layers": 2}
BATCHES = [whole(20), padded(), padded(3, 24, "left"), whole(24), whole(9, 5), whole(20)]
SIDES = BATCHES[1:3]
FORMS = (zoo.batch(256, 2, 16), padded(seed=1), packed((7, 9), (4, 12)))
VARLEN = "varlen_attention: reference"
FP32 = {"loss": 1e-6, "limit": 1e-4, "floor": 1e-4}  #: of rules that transformers computes in fp32
STATES = {"limit": 1e-3, "floor": 1e-3}


def of(family: str, **changes):
    return lambda: zoo.make(family, num_hidden_layers=2, use_cache=False, **changes)


def in_fp64(**changes):
    return lambda: attending(**changes).double()


def masked(batch: dict) -> dict:
    """With a mask of ones, as collators give it."""
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


# -- encoders ------------------------------------------------------------------------------------------------------------


def classifier() -> nn.Module:
    config = tf.BertConfig(**SIZES, **OFF, num_labels=3, max_position_embeddings=64)
    return tf.BertForSequenceClassification(config).double()


def classes(batch: dict) -> dict:
    """A class a row."""
    return {**batch, "labels": torch.arange(len(batch["labels"])) % 3}


def bert(**dropout) -> nn.Module:
    return tf.BertForMaskedLM(tf.BertConfig(**SIZES, **OFF | dropout, max_position_embeddings=64)).double()


def modern_bert() -> nn.Module:
    """Its first layer sees all of a document, the second those nearer than 5."""
    config = tf.ModernBertConfig(**SIZES, **TOKENS, local_attention=8, global_attn_every_n_layers=2)
    return without_mlps(tf.ModernBertForMaskedLM(config)).double()


def bart() -> nn.Module:
    """Its written-out attention to the encoder's tokens has no mask, so rows of documents would see each other's."""
    side = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}
    small = {"d_model": 32, "max_position_embeddings": 64, "vocab_size": 256, "dropout": 0.0}
    small |= {f"{name}_{what}": n for name in ("encoder", "decoder") for what, n in side.items()}
    return tf.BartForConditionalGeneration(tf.BartConfig(**small, attn_implementation="eager")).double()


# -- packed rows ---------------------------------------------------------------------------------------------------------


def collated() -> list[dict]:
    """Rows by a collator of transformers: what it says beside the mask is another kind of call, whatever it says."""
    rows = [{"input_ids": zoo.batch(256, 1, length, seed=length)["input_ids"][0].tolist()} for length in (4, 9, 6)]
    both = tf.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)  # as TRL's does by default
    return [dict(tf.DataCollatorWithFlattening()(rows)), *(dict(both(rows[:count])) for count in (3, 2, 3))]


def qwen_vl() -> nn.Module:
    """Text, time, height and width: of packed rows the model itself says which tokens see each other."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    sizes = {**SIZES, "hidden_size": 64, "num_key_value_heads": 2}
    return without_mlps(Qwen2_5_VLTextModel(tf.Qwen2_5_VLTextConfig(**sizes, rope_parameters=rope)))


def in_four_rows() -> list[dict]:
    row = packed((7, 9))
    return [{"input_ids": row["input_ids"], "position_ids": row["position_ids"][None].expand(4, -1, -1)}]


def of_states(model: nn.Module, batch: dict) -> torch.Tensor:
    return model(**batch).last_hidden_state.square().mean()


def delta(*kinds: str):
    def build() -> nn.Module:
        return without_mlps(
            hybrids.make("qwen3_5", num_hidden_layers=len(kinds), layer_types=list(kinds), use_cache=False)
        )

    return build


def mamba2() -> nn.Module:
    return hybrids.make("mamba2", torch.float32, num_hidden_layers=2)


def granite() -> nn.Module:
    return hybrids.make("granite_hybrid", torch.float32, layer_types=["mamba", "attention"] * 2)


def enabled(reentrant: bool):
    return lambda model: model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def wrapped(reentrant: bool):
    """By torch's own wrapper, which FSDP's users put around layers."""

    def change(model: nn.Module) -> None:
        kind, layers = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT, model.model.layers
        for place, layer in enumerate(layers):
            layers[place] = checkpoint_wrapper(layer, kind)

    return change


def called(reentrant: bool):
    return checkpoints(*(f"model.layers.{place}" for place in range(4)), reentrant=reentrant)


def trained_inputs(change, reentrant: bool):
    def both(model: nn.Module) -> None:
        change(reentrant)(model)
        if reentrant:
            model.enable_input_require_grads()

    return both


ROW, ROWS = (each | {"use_cache": False} for each in documents(5, 41, 1, 30))
SHORT = documents(5, 21, 1, 10)


# -- sizes ---------------------------------------------------------------------------------------------------------------


def often(patch) -> None:
    patch.setattr(rounding, "OFTEN", 2)


def with_windows_and_waits(patch) -> None:
    kernels_have_windows(patch)
    waited_for(patch)


def looks(model: nn.Module) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: None)


def lengths(*sizes: int | tuple[int, int]) -> Sequence[dict]:
    return [whole(*((size,) if isinstance(size, int) else size)) for size in sizes]


CHANGING = (20, 24, 26, 21, 30, 29, 25, 31, 27, 18)
BY_PADDED = {"whole-by-padded": 2, "padding-removed": 2}
EAGER = {"attn_implementation": "eager"}
WINDOW = {key: WINDOWS[key] for key in ("layer_types", "sliding_window")}
WINDOWED = dict(family="mistral", sliding_window=6, use_cache=False)

QUICK = {
    "classes of rows": Run(
        build=classifier, batches=[*map(classes, BATCHES)], limits=EXACT, compiles=3, kept="labels-shape"
    ),
    "masked words": Run(build=bert, batches=SIDES, limits=EXACT, removed=2),
    "attention with next to no dropout": Run(
        build=lambda: bert(attention_probs_dropout_prob=1e-8),
        batches=SIDES,
        limits=EXACT,
        removed=2,
        provider="dropout_attention: reference",
    ),
    "windows both ways": Run(build=modern_bert, batches=SIDES, limits=EXACT, removed=2, provider=VARLEN),
    "positions in four rows": Run(build=qwen_vl, batches=in_four_rows, loss=of_states),
    "delta rules": Run(
        build=delta("linear_attention", "linear_attention"), batches=[padded(4, 90)], limits=FP32, removed=1
    ),
    "bounds that a model keeps from its layers": Run(  # states cross in eager, and where no bounds are given
        build=mamba2, batches=SHORT[:1], plain=SHORT[1:], limits=STATES, apart=1
    ),
    "bounds that only the model knows, checkpointed": Run(  # a repetition cannot know them: gradients were off by 4
        checkpoints("backbone.layers.0", "backbone.layers.1", reentrant=True),
        build=mamba2,
        batches=[ROW],
        limits=STATES,
        said={"bounds-not-handed-on": "Mamba2Block"},
    ),
    "two graphs for all batches": Run(
        build=in_fp64(), batches=BATCHES, limits=EXACT, removed=2, compiles=2, said=BY_PADDED
    ),
    "one graph where padded ones come first": Run(
        build=in_fp64(),
        batches=[padded(), masked(whole(20)), padded(3, 24, "left"), masked(whole(9, 5)), padded(), masked(whole(20))],
        limits=EXACT,
        removed=3,
        compiles=1,
        said={"whole-by-padded": 3},
    ),
    "windows that are constants of graphs": Run(
        build=in_fp64(family="mistral", sliding_window=32),
        batches=BATCHES,
        limits=EXACT,
        removed=2,
        compiles=2,
        said=BY_PADDED,
    ),
    "lengths that do not recur": Run(
        build=in_fp64(),
        batches=lengths(*CHANGING),
        patched=waited_for,
        limits=EXACT,
        compiles=2,
        said={"sizes-rounded": 9},
    ),
    "whole rows in a window": Run(  # masks are presumed in the end; then others, with padding among them, and shorter ones
        build=in_fp64(**WINDOWED),
        batches=[*(zoo.batch(256, 2, 20, seed=seed) for seed in range(5)), *lengths((28, 3)), padded(3, 25)]
        + lengths(6, 35, 20),
        patched=kernels_have_windows,
        limits=EXACT,
        removed=1,
        whole=8,
    ),
    "whole rows in a window that somebody looks at": Run(
        looks, build=lambda: attending(**WINDOWED), batches=lengths(20), patched=kernels_have_windows, whole=0
    ),
}
SLOW = {
    "masked words, whole rows by padded ones": Run(
        build=bert, batches=BATCHES, limits=EXACT, removed=2, compiles=2, said=BY_PADDED
    ),
    **{
        f"chunks, {name}": Run(
            build=of("llama4", attention_chunk_size=6, no_rope_layers=[1, 1], attn_implementation=name),
            batches=FORMS,
            removed=1,
            apart=2,
            provider=VARLEN,
        )
        for name in ("sdpa", "eager")
    },
    **{
        f"attention that is written out, {family}": Run(
            build=of(family, **more), batches=FORMS, removed=1, apart=int(family != "gpt_oss"), provider=VARLEN
        )
        for family, more in {
            "gpt_oss": WINDOW,  # whose sequences see each other: it makes its masks without positions
            "llama": EAGER,
            "gemma2": {**WINDOW, **EAGER, "attn_logit_softcapping": 0.02},
            "gptj": {},  # it returns its weights, and looks up positions in a table
            "codegen": {},  # its scores get their factor behind the mask
            "deepseek_v3": {**EAGER, "first_k_dense_replace": 2},  # values narrower than queries
        }.items()
    },
    "a decoder that reads an encoder": Run(
        build=bart, batches=FORMS[:1], limits={"loss": 1e-12, "limit": 1e-9, "floor": 1e-6}, kept="mixes-tokens"
    ),
    "a table that is trained": Run(
        build=lambda: zoo.adapt(attending(), target_modules=["q_proj"], modules_to_save=["embed_tokens"]), removed=1
    ),
    "tokens that are trained": Run(
        build=lambda: zoo.adapt(attending(), target_modules=["q_proj"], trainable_token_indices=[1, 2]), removed=1
    ),
    "a collator": Run(build=lambda: attending(use_cache=False), batches=collated, apart=4, compiles=2),
    "documents that only positions tell of": Run(
        build=delta("linear_attention", "full_attention"),
        batches=[packed((5, 67, 30))],
        limits=FP32,
        apart=1,
        said={"states-cross-documents": "Qwen3_5DecoderLayer"},
    ),
    "positions that a model keeps from its layers": Run(
        build=mamba2, batches=[packed((5, 21, 10))], limits=STATES, said={"bounds-not-handed-on": "Mamba2Block"}
    ),
    **{
        f"documents under checkpoints, {way.__name__}{', reentrant' * reentrant}": Run(
            trained_inputs(way, reentrant), build=granite, batches=[ROW], plain=[ROWS], limits=STATES, apart=1
        )
        for way in (enabled, called, wrapped)
        for reentrant in (False, True)
    },
    "others that have a graph stay with it": Run(
        batches=[whole(20), whole(24), padded(), whole(26)], removed=1, compiles=3
    ),
    "many get a graph of their own": Run(
        batches=[whole(20), padded(), *lengths(24, 26, 28, 24)],
        patched=often,
        removed=1,
        compiles=3,
        said={"whole-by-padded": 2},
    ),
    **{
        f"tokens that are real, {family}": Run(
            build=lambda family=family: hybrids.make(family),
            batches=BATCHES,
            limits={"limit": 1e-5},
            removed=2,
            compiles=2,
            said=BY_PADDED,
        )
        for family in ("lfm2", "qwen3_5", "bamba", "nemotron_h", "falcon_h1")
    },
    **{
        f"full layers beside those with a window, {family} {window}": Run(
            build=lambda family=family, window=window: zoo.adapt(
                zoo.make(family, **{**WINDOWS, "sliding_window": window}), r=4
            ).double(),
            batches=[*BATCHES[:2], *BATCHES[3:]],
            patched=kernels_have_windows,
            limits=EXACT,
            removed=1,
            compiles=graphs,
            said={"whole-by-padded": 2},
        )
        for family, window, graphs in (("gemma3", 6, 3), ("gemma4", 6, 3), ("gemma4", 64, 4))
    },
    "full layers beside those with a window, rounded up": Run(
        build=lambda: zoo.make("gemma3", **WINDOWS, use_cache=False).double(),
        batches=lengths(5, 6, 20, 23, 26, 29, 32),
        patched=with_windows_and_waits,
        limits=EXACT,
        whole=6,
    ),
    "rows alone and numbers of rows": Run(
        batches=lengths(*CHANGING[:2], (64, 1), (40, 1), 20, 31, (100, 1), (32, 4), (128, 1)),
        patched=waited_for,
        compiles=2,
    ),
}


@cases(QUICK, SLOW)
def test_steps_are_eagers_and_few_graphs(run, monkeypatch):
    run.check(monkeypatch)


def test_dropout_of_attention_draws_other_weights_in_each_step():
    model = optimized(bert(attention_probs_dropout_prob=0.5))
    assert len({float(zoo.step(model, padded())[0]) for _ in range(3)}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_two_batches_before_one_backward(reentrant):
    """The first is repeated when another one, of other documents and with padding, has been decided."""
    plain, model, other = granite(), granite(), padded(4, 60)
    trained_inputs(called, reentrant)(model)
    (optimized(model)(**ROW).loss + model(**other).loss).backward()
    expected = [unwrapped(zoo.step(plain, batch))[1] for batch in (ROWS, other)]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, sum(each[name] for each in expected), rtol=1e-3, atol=1e-5)
