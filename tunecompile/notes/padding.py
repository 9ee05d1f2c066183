"""Notes about padded and packed batches, and why they stay as they are."""

from tunecompile.notes.kind import NoteKind

NOTES = {
    "padding-removed": NoteKind("padding is removed before the layers ({count} batches)"),
    "packed-without-mask": NoteKind("packed sequences are kept apart without a mask ({count} batches)"),
    "prefixes-shared": NoteKind(
        "prefixes that rows share are computed once ({count} batches, {tokens} tokens in place of {rows})"
    ),
    "prefixes-kept": NoteKind(
        "prefixes that rows share are computed in each of them: {detail}",
        "Follow the reason, if it is yours to change. The numbers are right.",
    ),
    "prefix-uncounted": NoteKind(
        "a prefix that rows share is counted in each of them: {detail} reads whole rows, for which there is no estimate"
    ),
    "padding-kept": NoteKind(
        "padded batches keep their padding: {detail}",
        "Follow the reason, if it is yours to change. The numbers are right; padding only costs time and memory.",
    ),
    "packing-kept": NoteKind(
        "packed batches keep their mask: {detail}",
        "Follow the reason, if it is yours to change. The numbers are right.",
    ),
    "sizes-rounded": NoteKind(
        "sizes of {subject} other than the first are rounded up, so that they recur ({count} batches)"
    ),
    "whole-by-padded": NoteKind(
        "rows of {subject} without padding run by the graph of documents, where their size is not the first one's "
        "({count} batches)"
    ),
    "sizes-kept": NoteKind("sizes of {subject} are not rounded up, so that they seldom recur: {detail}"),
    "states-cross-documents": NoteKind(
        "states of {subject} cross from one packed sequence to the next, as the model's own code has it",
        "Give the model cu_seq_lens_q with each packed batch, which has one row (DataCollatorWithFlattening of "
        "transformers does, with return_flash_attn_kwargs=True): states and convolutions begin anew there.",
    ),
    "bounds-not-handed-on": NoteKind(
        "states of {subject} cross from one packed sequence to the next: the model's own code tells its layers nothing "
        "of where sequences begin",
        "Give this model padded batches, a row a sequence: padding is removed before the layers.",
    ),
    "attention-outside": NoteKind(
        "attention runs outside of the compiled graphs: context_parallel sends keys and values around"
    ),
}

REASONS = {
    # the model's structure
    "mixes-tokens": NoteKind("its layers may mix tokens by more than attention: {detail}"),
    "graph-not-understood": NoteKind("a layer's graph is not understood ({detail})"),
    "has-graph-breaks": NoteKind("its layers have graph breaks"),
    "runs-eagerly": NoteKind("its layers run eagerly"),
    "layer-not-compiled": NoteKind(
        "a {subject} among the layers is not compiled by tunecompile", "Call tunecompile.optimize once more."
    ),
    "no-mask-in-layers": NoteKind(
        "its layers are given no boolean mask [B, 1, T, T] that says which tokens see each other"
    ),
    "one-owner-several-lists": NoteKind("one module owns several lists of layers"),
    # prefixes that rows share
    "prefixes-unread": NoteKind("batches are not looked at for prefixes that rows share: {detail}"),
    "not-by-token": NoteKind("{detail} cannot be compared token by token"),
    "embeddings-train": NoteKind("each row's embeddings have a gradient of their own", "Give the model token ids."),
    "states-of-branches": NoteKind("{detail} would go on from one branch of a prefix to the next"),
    "draws-random": NoteKind("each copy draws random numbers of its own ({detail})", "Switch dropout off."),
    "copies-differ": NoteKind(
        "equal tokens do not reach the layers as equal ones (of dropout or noise on embeddings, or of places in a row)"
    ),
    # code that may read other tokens
    "hook-on-all-modules": NoteKind("a hook is registered for all modules", "Remove the hook for training steps."),
    "head-mixes-tokens": NoteKind("its head mixes tokens"),
    "unknown-module": NoteKind(
        "the forward of {subject} is in {home}, and may read more than one token, or keep what it reads",
    ),
    "hook-on-module": NoteKind("a hook is registered on {subject}", "Remove the hook for training steps."),
    # the batch and how the model is called
    "labels-shape": NoteKind("labels are not [B, T]"),
    "output-required": NoteKind("{subject} is required", "Leave it out, if it is not used."),
    "argument-given": NoteKind("layers are given {subject}"),
    "cache-used": NoteKind("a cache is used", "Set model.config.use_cache = False."),
    "labels-at-padding": NoteKind(
        "tokens at padding have labels, and count in the loss",
        "Set the labels at padding to -100, as transformers' collators do.",
    ),
    "row-interrupted": NoteKind("the tokens of a row are not contiguous", "Pad at one end of each row."),
    "sequences-see-each-other": NoteKind(
        "the model lets their sequences see each other, as transformers does where a cache is made "
        "(model.config.use_cache = False makes none)",
        "Set model.config.use_cache = False, if the sequences should be independent.",
    ),
    "masks-not-understood": NoteKind("its masks are not understood"),
    "logits-read": NoteKind(
        "logits are read beside the loss, at padding perhaps (layers ran once more in the first such step, with it)",
        "Compute metrics in an evaluation, or from labelled rows only.",
    ),
    # the loss
    "no-labels": NoteKind(
        "no labels are given to the model, so a loss may read values at padding",
        "Give the model labels, and use the loss that it returns.",
    ),
    "unknown-caller": NoteKind(
        "{subject} calls the layers, and may read values at padding (it cannot where a transformers model computes the "
        "loss, from its labels)",
    ),
    "unknown-forward": NoteKind(
        "the forward of {subject} is in {home}, not transformers' own, and may read values at padding",
    ),
    "unknown-loss-function": NoteKind(
        "its loss_function is in {subject}, not transformers' own, and may count values at padding",
    ),
    "shift-labels": NoteKind(
        "shift_labels are given, which the loss may read in place of labels", "Give labels instead."
    ),
    # attention
    "gpu-without-kernel": NoteKind("this GPU has no kernel for attention without padding"),
    "no-unpadded-kernel": NoteKind(
        "no kernel computes attention in this precision, or with heads this wide, without padding",
        "Train in bfloat16 or float16.",
    ),
    "other-attention": NoteKind(
        "the attention implementation is {subject}, and stays so", "Load the model with attn_implementation='sdpa'."
    ),
    "context-parallel": NoteKind("context_parallel gives each process a part of every sequence"),
    "checkpoint-around-layers": NoteKind(
        "a checkpoint is around all layers, and would have to repeat the decision",
        "Use model.gradient_checkpointing_enable(), which checkpoints each layer.",
    ),
    "weights-gathered": NoteKind(
        "weights are gathered from other ranks, and a rank that has to begin a batch again would be alone"
    ),
    "weights-of-call": NoteKind("the call has weights of its own (torch.func.functional_call)"),
    "attention-not-causal": NoteKind("attention without a mask is not known to be causal in all layers"),
    "own-mask": NoteKind("its layers make a mask of their own"),
    "attention-dropout": NoteKind("it has dropout in attention", "Set attention_dropout = 0 in the model's config."),
    "attention-argument": NoteKind("its attention takes {detail}"),
    "output-holds-more": NoteKind("its output holds more than hidden states"),
}
