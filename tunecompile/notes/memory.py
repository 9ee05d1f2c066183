"""Notes about memory: plans, running out of it, and tables in host memory."""

from tunecompile.notes.kind import NoteKind

NOTES = {
    # batches that a trainer accumulates
    "accumulation-merged": NoteKind(
        "{count} accumulated batches of {rows} rows come as one of {merged}: the same rows a step, the same loss. With "
        "rows of {length} tokens its peak is predicted to be {peak}, {budget} are allowed"
    ),
    "accumulated-apart": NoteKind(
        "accumulated batches of about {tokens} tokens are small: {count} at once, {total} tokens, would take about "
        "{percent} % of a step's time and at most {peak} of {room}: {count} times the rows "
        "(per_device_train_batch_size), gradient_accumulation_steps={steps}",
        "Train with these settings, or give a Trainer tunecompile.Callback(merge_accumulation=True).",
    ),
    "accumulation-kept": NoteKind("accumulated batches are not merged: {detail}"),
    "no-memory-plan": NoteKind(
        "no memory plan for {subject}: {detail}",
        "These layers run as without memory=. Follow the reason.",
    ),
    "few-memory-plans": NoteKind(
        "not all memory plans for {subject}: {detail}",
        "The plan is chosen from fewer ones, and may be slower than necessary. Report it with the error.",
    ),
    "checkpointing-is-budget": NoteKind(
        "gradient checkpointing is enabled, so layers are computed twice only where memory requires it: the budget is "
        "what checkpoints need at the largest batch, and at least half of what was free at the first step ({detail} of "
        "tensors at the peak)",
        "Set memory= for another budget, such as the smallest step.",
    ),
    "over-budget": NoteKind(
        "the smallest plan for {tokens} tokens needs {detail} more than memory={subject} allows: it is run all "
        "the same",
        "Use a smaller batch, or give more memory or host_memory.",
    ),
    "ran-out-of-memory": NoteKind(
        "{subject} ran out of memory: the plan was {before}, and is now {detail}",
        "Nothing: the step was completed. If it happens often, other processes may use the GPU.",
    ),
    "smallest-plan-ran-out": NoteKind(
        "{subject} ran out of memory under its smallest plan ({detail}), and layers had to recompute everything",
        "Use a smaller batch, or give more host_memory.",
    ),
    "no-budget": NoteKind(
        'out of memory, and no budget is set. With optimize(model, memory="auto") activations are recomputed or '
        'offloaded to host memory, as few as needed. tunecompile.estimate(model, shape, memory="auto") says what such '
        "a step takes",
        'Call optimize(model, memory="auto").',
    ),
    "rank-plans": NoteKind("rank {subject} of {ranks}: {detail}"),
    "layers-not-repeated": NoteKind(
        "layers are not repeated where memory runs out in the backward pass: they {detail}",
        "Under a tight budget, memory that runs out ends the step. Follow the reason, or give a smaller memory=.",
    ),
    "embedding-on-host": NoteKind("{subject} ({detail}) is in host memory"),
    "embedding-on-device": NoteKind("{subject} stays on the device: {detail}"),
    "no-embedding": NoteKind("host_embedding: the model has no nn.Embedding", "Leave host_embedding= out."),
    "on-device": NoteKind("{subject}: {detail}"),
}

REASONS = {
    "weights-not-on-device": NoteKind(
        "between calls their weights are not on {subject}",
        "Load the model so that these layers' weights stay on a device.",
    ),
    # what is known of other ranks' plans
    "same-plan": NoteKind("all ranks follow the same plan"),
    "no-other-plan": NoteKind("no other plan is known"),
    "other-plans": NoteKind("{detail}", "Nothing: plans are compatible. Batches or free memory of the ranks differ."),
    # why a layer's call cannot be repeated
    "share-parameters": NoteKind("share their parameters with other processes, which would have to repeat it, too"),
    "exchange-keys": NoteKind("exchange keys and values with other processes, which would have to repeat it, too"),
    "have-hooks": NoteKind("have hooks, which may keep what is inside", "Remove the hooks for training steps."),
    "write-in-place": NoteKind("write to their arguments or buffers"),
    "outside-tensors": NoteKind("use tensors with a gradient that are neither arguments nor parameters of theirs"),
    "parameter-hooks": NoteKind("have hooks on their parameters"),
    "several-graphs": NoteKind("are not compiled as one graph, beside which other values with a gradient are not seen"),
    "expose-tensors": NoteKind("expose tensors with a gradient beside what they return"),
    "given-object": NoteKind("are given a {subject}"),
    "return-object": NoteKind("return a {subject}"),
    # why accumulated batches are not merged
    "nothing-accumulated": NoteKind("gradient_accumulation_steps is 1"),
    "several-processes": NoteKind("there are several processes or GPUs, which might decide differently"),
    "own-batches": NoteKind("{subject} has its own {detail}, so that a batch may mean something else there"),
    "differs-by-batch": NoteKind("a step would not be the same, by {detail}"),
    "added-late": NoteKind(
        "the callback came after the Trainer was made", "Hand it to the Trainer: callbacks=[tunecompile.Callback(...)]."
    ),
    "rows-unknown": NoteKind(
        "it is not known how long a row may be", "Set max_length (TRL), or train on a dataset with a column input_ids."
    ),
    "room-unknown": NoteKind("it is not known how much memory there is", "Name a budget: memory=."),
    "no-room": NoteKind(
        "{subject} at once would need {peak}, and {budget} are allowed",
        "Lower max_length where rows are shorter, or raise memory=.",
    ),
    # why a table stays on the device
    "table-trained": NoteKind("it is trained"),
    "table-shared": NoteKind("another module shares it"),
    "table-not-plain": NoteKind("it is no plain tensor"),
    "table-renormalises": NoteKind("it renormalises the rows it reads"),
}
