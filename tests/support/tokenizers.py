"""Small tokenizers by bytes, with the splits that models have."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tunecompile.integrations.export import gguf as writer

SPLITS = {
    "llama-bpe": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(writer.WORDS % "{1,3}"), "isolated"), by_bytes(False)]
    ),
    "qwen2": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(writer.WORDS % ""), "isolated"), by_bytes(False)]
    ),
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes(True)]),
    "gpt-2": lambda: by_bytes(True),
}


def by_bytes(words):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)


def byte_level(split="llama-bpe", bos=True):
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc"]
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)}, [("a", "b"), ("ab", "c")], ignore_merges=split == "llama-bpe"
        )
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = SPLITS[split](), decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 0)])
    return finished(tokenizer)


def finished(tokenizer):
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template="{{ messages[0]['content'] }}"
    )
