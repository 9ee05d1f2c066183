"""Training steps of an embedding model by sentence-transformers' own trainer: times, graphs, memory; one JSON.

    python benchmarks/steps/embeddings.py --model qwen3-embedding-0.6b --mode lora --seconds 150 \\
        --systems hf-checkpoint,unsloth-no-checkpoint,tunecompile,hf --out benchmarks/results/embeddings-qwen3-0.6b-lora.json

Pairs of texts with the loss of their batch (MultipleNegativesRankingLoss), random weights in bf16, LoRA on all linears
of layers or all weights. Lengths are log-normal, each step has others, and all systems are given the same. `hf` is
sentence-transformers as it is; 256 texts with their padding took more than an H200 has, hence `hf-checkpoint`. `compile`
is torch.compile of the transformer; Unsloth is told of a run of a thousand steps, by which it decides what to compile. A
step ends where the next one begins, and workers prepare batches. Each system has a process of its own, and its row is
written when it ends. Without a GPU, models whose names end in `-tiny` are for trials.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._results import ENVIRONMENT, print_row, run_apart, system_apart
from benchmarks._rows import draw_lengths
from benchmarks._steps import StepTimes, tell
from tunecompile.cli.compare.spec import system

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

RANK, LR = 16, 1e-5
UNTIMED = 8  #: steps
TOLD = 1000  #: steps of the run that a trainer is told of; it is stopped when those that count are done
LONGEST = 4  #: rows, in typical ones
WORDS = 8000  #: of the tokenizer, a token each
WORKERS = 2  #: that prepare batches on a GPU's machine, as quickly as any system trains
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_QWEN3 = dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=32768, tie_word_embeddings=True)
_XLM_R = dict(num_attention_heads=16, max_position_embeddings=8194, type_vocab_size=1, layer_norm_eps=1e-5)
_TINY = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=8192)
_QWEN3_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: model -> its kind, and what differs from that one's own config
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-embedding-0.6b": (
        "qwen3",
        dict(_QWEN3, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16)
        | dict(vocab_size=151669, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    ),
    "bge-m3": (
        "xlm-roberta",
        dict(_XLM_R, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, vocab_size=250002),
    ),
    "qwen3-tiny": ("qwen3", dict(_QWEN3, **_TINY) | dict(num_key_value_heads=1, head_dim=16)),
    "xlm-roberta-tiny": ("xlm-roberta", dict(_XLM_R, **_TINY)),
}
#: kind -> which token is the text's, where padding is, and linears of its layers
KINDS = {
    "qwen3": ("lasttoken", "left", _QWEN3_LINEARS),
    "xlm-roberta": ("cls", "right", ("query", "key", "value", "dense")),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-embedding-0.6b")
    parser.add_argument("--mode", choices=("lora", "full"), default="lora")
    parser.add_argument("--layers", type=int, help="so many layers only")
    parser.add_argument("--rows", type=int, default=256, help="texts of a step, two of each pair")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text, in the median")
    parser.add_argument("--systems", default="hf-checkpoint,unsloth-no-checkpoint,tunecompile,hf,compile")
    parser.add_argument("--steps", type=int, default=20, help=f"timed steps, after {UNTIMED} that are not")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that all of it may take")
    parser.add_argument("--logs", type=Path, help="folder for the processes' output")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of the process of one system
    return parser.parse_args()


def save(given: argparse.Namespace, folder: str, device: str) -> None:
    """Save random weights in bf16 with a tokenizer of numbers, as sentence-transformers loads a model."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

    kind, fields = MODELS[given.model]
    pooling, side, _ = KINDS[kind]
    about = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, **fields}
    config = AutoConfig.for_model(kind, **about | ({"num_hidden_layers": given.layers} if given.layers else {}))
    torch.manual_seed(0)
    with torch.device(device):
        AutoModel.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *map(str, range(WORDS))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(
        tokenizer_object=words, padding_side=side, model_max_length=LONGEST * given.length, **names
    ).save_pretrained(folder)
    chain = [Transformer(folder), Pooling(config.hidden_size, pooling_mode=pooling), Normalize()]
    SentenceTransformer(modules=chain, device="cpu").save(folder, create_model_card=False)


def load(given: argparse.Namespace, device: str) -> SentenceTransformer:
    """The model as users of the system train it, with adapters of the same values in each."""
    import torch

    from tunecompile.cli.compare.models import set_initial_adapter

    about = system(given.systems)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    targets = [*KINDS[MODELS[given.model][0]][2]]
    if about.engine == "unsloth":
        model = load_unsloth(given, dtype, targets)
    else:
        from peft import LoraConfig, inject_adapter_in_model
        from sentence_transformers import SentenceTransformer

        how = {"attn_implementation": "sdpa", "dtype": dtype}
        model = SentenceTransformer(given.folder, device=device, model_kwargs=how)
        if given.mode == "lora":
            adapter = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets)
            inject_adapter_in_model(adapter, model[0].auto_model)  # as `model.add_adapter`, with any release of PEFT
    if about.engine == "hf" and about.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    set_initial_adapter(model, seed=0)
    if about.engine == "compile":
        inner = model[0].auto_model
        inner.forward = torch.compile(inner.forward, backend="inductor" if device == "cuda" else "eager")
    elif about.engine == "tunecompile":
        import tunecompile

        tunecompile.optimize(model, memory=about.memory, executor="inductor" if device == "cuda" else "eager")
    return model


def load_unsloth(given: argparse.Namespace, dtype: Any, targets: list[str]) -> SentenceTransformer:
    """Load and adapt with Unsloth's functions. The process has to import unsloth first."""
    from unsloth import FastSentenceTransformer

    checkpointing = "unsloth" if system(given.systems).checkpointing else False
    model = FastSentenceTransformer.from_pretrained(
        given.folder,
        max_seq_length=LONGEST * given.length,
        dtype=dtype,
        full_finetuning=given.mode == "full",
        use_gradient_checkpointing=checkpointing,
        use_unpadding="auto",
    )
    if given.mode == "full":
        return model
    return FastSentenceTransformer.get_peft_model(
        model,
        r=RANK,
        lora_alpha=RANK,
        target_modules=targets,
        use_gradient_checkpointing=checkpointing,
        task_type="FEATURE_EXTRACTION",
    )


def draw_texts(count: int, length: int) -> list[str]:
    """So many texts, always the same."""
    random.seed(0)
    lengths = draw_lengths(count, length, LONGEST * length)
    return [" ".join(str(random.randrange(WORDS)) for _ in range(tokens)) for tokens in lengths]


def in_turn(dataset: Any, batch_size: int, drop_last: bool, **_: Any) -> Any:
    """A batch sampler of sentence-transformers' that takes rows as they come."""
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from torch.utils.data import SequentialSampler

    return DefaultBatchSampler(SequentialSampler(dataset), batch_size=batch_size, drop_last=drop_last)


def watch(times: StepTimes, tokens: list[int]) -> Any:
    """A callback of the trainer's that tells the times of so many steps, and then ends training."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not times.ms:
                times.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times.end(tokens[len(times.ms)])
            control.should_training_stop = len(times.ms) == len(tokens)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            times.losses += [logs["loss"]] if "loss" in logs else []

    return Watch()


def train(model: SentenceTransformer, given: argparse.Namespace, device: str) -> StepTimes:
    """What steps took by sentence-transformers' trainer, which has its own defaults."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    steps, cuda = UNTIMED + given.steps, device == "cuda"
    texts = draw_texts(steps * given.rows, given.length)
    tokens = [sum(len(text.split()) for text in texts[at : at + given.rows]) for at in range(0, len(texts), given.rows)]
    settings = SentenceTransformerTrainingArguments(
        output_dir=f"{given.folder}/out",
        max_steps=TOLD,
        per_device_train_batch_size=given.rows // 2,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        bf16=cuda,
        use_cpu=not cuda,
        batch_sampler=in_turn,
        dataloader_num_workers=WORKERS * cuda,
        dataloader_pin_memory=cuda,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    times = StepTimes(device)
    SentenceTransformerTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_dict({"anchor": texts[::2], "positive": texts[1::2]}),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=[watch(times, tokens)],
    ).train()
    return times


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The row of one system, in this process."""
    about = system(given.systems)
    if about.engine == "unsloth":
        import unsloth  # noqa: F401
    import torch

    from tunecompile.cli.compare.meters import memory_figures, reset_memory

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(given, device)
    reset_memory(device)
    try:
        times = train(model, given, device)
    except torch.OutOfMemoryError:
        return {"status": "oom"}
    if about.engine == "tunecompile":
        import tunecompile

        print(tunecompile.report(model))
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {"status": "ok", **times.figures(UNTIMED), "trainable_parameters": count, **memory_figures(device)}


def run(given: argparse.Namespace, name: str, folder: str, seconds: float) -> dict[str, Any]:
    """The row of one system, from a process of its own."""
    options = ("model", "mode", "rows", "length", "steps")
    return system_apart(given, __file__, name, options, seconds, "--folder", folder)


def main() -> int:
    given = parse_arguments()
    os.environ |= ENVIRONMENT
    if given.folder:
        print_row(measure(given))
        return 0
    about = {"model": given.model, "mode": given.mode, "trainer": "sentence-transformers", "budget_gib": None}
    about |= {"shape": f"{given.rows}x~{given.length}"} | ({"rank": RANK} if given.mode == "lora" else {})
    about |= {"layers": given.layers} if given.layers else {}
    cases = {
        name: {"system": name, "checkpointing": bool(system(name).checkpointing), **about}
        for name in given.systems.split(",")
    }
    return run_apart(
        given,
        cases,
        save=lambda folder, device: save(given, folder, device),
        run=lambda name, folder, seconds: run(given, name, folder, seconds),
        tell=tell,
    )


if __name__ == "__main__":
    raise SystemExit(main())
