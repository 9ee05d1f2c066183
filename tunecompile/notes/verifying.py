"""Notes of `verify`, `estimate` and `plan`."""

from tunecompile.notes.kind import NoteKind

NOTES = {
    "verified": NoteKind("verified: {detail}", "Where gradients are not as near as eager's, see `verify`."),
    "not-verified": NoteKind("not verified: {detail}", "Follow the reason, or call `verify` with a batch of your own."),
    "verified-on-ranks": NoteKind("verified on {count} of {ranks} other ranks: {detail}"),
    "rewrite-switched-off": NoteKind(
        "the rewrite at fault is {subject}{detail}: it is switched off for this model",
        "The model trains without this rewrite. Report it with the lines.",
    ),
    "fault-beyond-rewrites": NoteKind(
        "it is wrong without any rewrite, too: the fault is in generated code, or in head and loss. "
        "tunecompile.restore(model) removes both",
        "Train without tunecompile, and report it.",
    ),
    "judged-in-8-bits": NoteKind(
        "{subject} rounds on purpose: eager's frozen products are rounded, too, to three times its error",
        "Verify without precision= to judge the rewrites more closely.",
    ),
    "zeros-replaced": NoteKind("{count} trained matrices are zero: they were small and random for this step"),
    "dropout-off": NoteKind("dropout was off, in {count} places"),
    "region-not-called": NoteKind(
        "{subject} was not called on such a batch: its layers are counted as other layers are"
    ),
    "attention-not-fused": NoteKind(
        "attention is traced without a fused kernel: its scores are counted, which grow with the square of the length",
        "Load the model with attn_implementation='sdpa'.",
    ),
    "traced-on-cpu": NoteKind(
        "traced as on a CPU: the GPU's context (about 0.5 GiB) is not counted, and nothing is offloaded",
        "Name the GPU with gpu=.",
    ),
    "estimated-without-triton": NoteKind(
        "Triton is not installed here, so tunecompile's own kernels are left out: a step on the GPU is faster "
        "and smaller",
        "Install Triton, for an estimate that includes them.",
    ),
    "gpu-not-measured": NoteKind(
        "no {subject} was measured: its kernels are assumed to reach the same share of the datasheet's rates as an "
        "H200's"
    ),
    "full-training-state": NoteKind("full: weights, gradients and AdamW's two moments in {subject}"),
    "fsdp2-shards-floats": NoteKind(
        "FSDP2 shards floats only: 4-bit weights under it need bnb_4bit_quant_storage=torch.bfloat16",
        "Set it when the model is quantised.",
    ),
    "communication-modelled": NoteKind(
        "communication is modelled, not measured: rings at the links' bandwidth, hidden behind computation where "
        "engines "
        "overlap the two"
    ),
}

REASONS = {"right-on-ranks": NoteKind("it is right there, too")}
