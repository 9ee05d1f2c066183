"""Notes about what was compiled, how, and what ran eagerly."""

from tunecompile.notes.kind import NoteKind

NOTES = {
    "compiling-off": NoteKind(
        "{detail}",
        "torch lacks a function that tunecompile requires. Install the version of torch that the note names, or a "
        "newer tunecompile. The model trains as it would without tunecompile.",
    ),
    "emulated-card": NoteKind(
        "choices and memory are those of a {subject}, as {detail} asks",
        "For tests of choices on a card that is not there. Unset the variable to train.",
    ),
    "lost-name": NoteKind(
        "{detail}",
        "The package has removed or renamed a function that it does not document. The numbers are right. Install the "
        "version that the note names, or a newer tunecompile, to have the feature back.",
    ),
    "compiled-without-rewrites": NoteKind(
        "{subject} is compiled without rewrites: {detail}",
        "A rewrite failed on this layer, which runs as under torch.compile. The numbers are right. Report it "
        "with the error.",
    ),
    "kernels-not-combined": NoteKind(
        "{subject} is compiled with a launch for each of its kernels, since joining small ones failed: {detail}",
        "Nothing, or update torch: its scheduler failed. The numbers are right, and all rewrites are in.",
    ),
    "not-compiled": NoteKind(
        "{subject} runs eagerly, since it does not compile: {detail}",
        "The numbers are right. See whether torch.compile(layer) alone fails, too: then the error is torch's, "
        "else report it.",
    ),
    "ran-eagerly": NoteKind(
        "{subject} ran eagerly{times}: {detail}",
        "Follow the reason. Layers that run eagerly give the same numbers, only slower.",
    ),
    "given-up": NoteKind(
        "{subject} is compiled no further, and such calls run operation by operation: {detail}",
        "The numbers are right. Follow the reason to have these calls compiled.",
    ),
    "graph-break": NoteKind(
        "{subject} has graph breaks: {detail}",
        "Dynamo cannot trace an operation, such as a branch that depends on data. Change the line, if it is your code.",
    ),
    "package-passes": NoteKind(
        "passes of {subject}: {detail}",
        "Nothing. Leave a package out with TUNECOMPILE_PASSES.",
    ),
    "pass-switched-off": NoteKind(
        "{subject} of {package} is switched off for this model: {detail}",
        "The pass raised, or left an invalid graph. Update or remove the package, or leave it out with "
        "TUNECOMPILE_PASSES.",
    ),
    "attention-kernel": NoteKind("attention of {subject}: {detail}"),
    "flash-attention-3": NoteKind(
        "FlashAttention 3 is installed: after torch.nn.attention.activate_flash_attention_impl('FA3') it is "
        "measured in "
        "place of flash",
        "Call that function before training. It changes the whole process, so tunecompile does not.",
    ),
    "known-bug": NoteKind(
        "{detail}",
        "Nothing, or update the package. The bugs of other packages that tunecompile avoids are listed under "
        "private APIs.",
    ),
    "not-in-precision": NoteKind(
        "{op} of {subject} is not in {precision}: {detail}",
        "This op runs in the model's own precision. Follow the reason to have it in the chosen one.",
    ),
    "products-not-in-precision": NoteKind(
        "{count} matrix products of {subject} are not in {precision}: they are part of no op that can be",
        "Only frozen linears with adapters can be. Give these linears an adapter, if they should be.",
    ),
    "region-not-in-precision": NoteKind(
        "nothing in {subject} runs in {precision}: it has no frozen weight under an adapter that supports it",
        "Leave precision= out, or train adapters over frozen weights.",
    ),
    "provider-failed": NoteKind(
        "{subject} by {provider} failed, the reference is used: {detail}",
        "The numbers are right. Report it with the error.",
    ),
    "template-wrong": NoteKind(
        "the template {provider} of {subject} failed its trial on this GPU and is not used: {detail}",
        "The numbers are right, and the op is slower. Report it with the GPU and the versions that `tunecompile "
        "doctor` shows; another version of Triton may compile it rightly.",
    ),
    "kernel-function-replaced": NoteKind(
        "{subject} is not transformers' own, and is traced as it is",
        "Nothing, or leave transformers' function in its place: then an op is compiled for it.",
    ),
    "kernel-function-unknown": NoteKind(
        "{subject} gives something else than the op for it, and is traced as it is",
        "The numbers are right. This version of transformers has another such function; install the one that the "
        "documentation names, or a newer tunecompile.",
    ),
    "cache-read-only": NoteKind(
        "{subject} cannot be written: its content is linked into {folder}, where new code is kept",
        "Nothing: the code in the read-only folder is used.",
    ),
    "no-cache-folder": NoteKind(
        "neither {subject} nor {folder} can be written: nothing can be compiled",
        "Set TORCHINDUCTOR_CACHE_DIR to a folder that can be written.",
    ),
}

REASONS = {
    "graph-limit": NoteKind(
        "Dynamo's limit of {limit} graphs is reached (layers, adapters or arguments differ too much)",
        "Use fewer kinds of layers, adapters or arguments, or raise torch._dynamo.config.recompile_limit.",
    ),
    "compiled-too-often": NoteKind(
        "it was compiled anew at {limit} batches, the last time since {detail} no longer held",
        "A number that the layer reads changes from batch to batch. Keep it in a tensor, or change it less often.",
    ),
    "too-many-pieces": NoteKind(
        "graph breaks cut it into more than {limit} functions, and each of these would be compiled for itself",
        "Change the lines that its graph breaks name, if they are your code.",
    ),
    "texts-differ": NoteKind(
        "a text that it reads differs from layer to layer (of one {detail}), and each would be a graph of its own",
        "Keep what differs in a tensor or a module of the layer, if it is your code.",
    ),
    "loop-over-list": NoteKind(
        "a loop in it runs over a list whose length changes ({detail}), and would be a graph of its length",
        "Nothing, or replace the loop by an operation on one tensor, if it is your code.",
    ),
    "loop-over-tokens": NoteKind(
        "a loop at {subject} goes from token to token, and would be compiled to operations for each, anew for every "
        "length",
        "Use transformers' own class of this model, whose loops are known, or a function that computes whole chunks.",
    ),
    "loop-over-chunks": NoteKind(
        "the number of passes through a loop at {subject} depends on the length, and it is compiled for rows of "
        "{length} tokens alone",
        "Pack or pad to one length, or use transformers' own class of this model, whose loops are known.",
    ),
    "too-many-nodes": NoteKind(
        "its graph has {count} nodes, more than {limit} (a loop over chunks or time steps, say)",
        "Set TUNECOMPILE_NODES to a larger number to compile it all the same.",
    ),
    "too-slow-to-compile": NoteKind(
        "one compilation took {seconds} s, more than {limit} s",
        "Set TUNECOMPILE_SECONDS to a larger number to go on compiling.",
    ),
    "shared-graph-limit": NoteKind(
        "Dynamo's limit of {limit} graphs is reached by {subject}, which other layers share",
        "Raise torch._dynamo.config.recompile_limit.",
    ),
    "skipped-by-dynamo": NoteKind(
        "it is skipped by Dynamo (torch.compiler.disable?), or has nothing to compile",
        "Remove torch.compiler.disable from the layer, if it is your code.",
    ),
    "not-traceable": NoteKind("Dynamo could not trace it ({detail})", "Change the line, if it is your code."),
    "called-without-owner": NoteKind(
        "its layers were called without the module that owns them, which begins a training step",
        "Call the model, or the module that owns the layers, instead of its layers.",
    ),
    "never-called": NoteKind(
        "none of the {count} layers of {subject} is ever called as a module, so that nothing of them is compiled",
        "Call them by `layer(...)`, not by `layer.forward(...)`, nor their parts one by one.",
    ),
    "unknown-hooks": NoteKind("accelerate has hooks there that are not known to tunecompile"),
    "weights-loaded-per-call": NoteKind(
        "accelerate loads its weights from the host or a disk for each call",
        "Load the model so that the layer's weights stay on a device.",
    ),
    "modules-on-several-devices": NoteKind("its modules are on several devices", "Keep each layer on one device."),
    "hook-without-gradients": NoteKind("a hook inside runs without gradients"),
    "function-replaced": NoteKind(
        "{subject} is another function, which compiled code cannot call",
        "Put torch's function back, or replace the module that calls it.",
    ),
    "context-parallel-attention": NoteKind(
        "context_parallel sends keys and values around in attention, which is not called through the attention "
        "interface "
        "of transformers"
    ),
    "attention-in-fixed-order": NoteKind("in fixed order, since deterministic algorithms are required ({subject})"),
    "attention-not-chosen": NoteKind("{detail}, the others are switched off ({subject})"),
    "attention-not-measured": NoteKind("{kernel} first, not measured: {detail} ({subject})"),
    "attention-measured": NoteKind("{detail} ({subject}, {origin})"),
    "does-not-compile-with-it": NoteKind("{subject} does not compile with it: {detail}"),
}
