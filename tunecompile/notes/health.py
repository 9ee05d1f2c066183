"""Notes about a training's health, which `tunecompile.watch` writes while it runs."""

from tunecompile.notes.kind import NoteKind

NOTES = {
    "loss-not-finite": NoteKind(
        "step {step}: the loss is {value}",
        "Lower the learning rate, clip gradients (max_grad_norm=1.0), look at the rows of this batch, and train in "
        "bf16 rather than fp16.",
    ),
    "made-not-finite": NoteKind(
        "step {step}: the first value that is not finite is made by {op} in {subject} ({detail})",
        "Look at what that line is given: in fp16 values over 65,504 are infinite (train in bf16), and a division by "
        "zero, a root or a logarithm wants a lower bound.",
    ),
    "weight-not-finite": NoteKind(
        "step {step}: {subject} holds values that are not finite, from a step before",
        "Go back to the last checkpoint, lower the learning rate, and clip gradients (max_grad_norm=1.0).",
    ),
    "idle-experts": NoteKind(
        "{count} of the experts that are trained got no token in {looks} steps that were looked at ({subject})",
        "Train the router's balance, too (output_router_logits=True, router_aux_loss_coef), use larger batches, or "
        "leave these experts as they are.",
    ),
    "gradients-not-finite": NoteKind(
        "step {step}: gradients are not finite; in the backward pass it began at {subject}",
        "Lower the learning rate, clip gradients (max_grad_norm=1.0), and look at the rows of this batch.",
    ),
    "loss-spike": NoteKind(
        "step {step}: the loss jumped to {value}, from {usual} in the steps before",
        "Lower the learning rate or warm up longer, clip gradients (max_grad_norm=1.0), and look at the rows of this "
        "batch.",
    ),
    "loss-oscillates": NoteKind(
        "step {step}: the loss goes up and down from step to step, by {value} around {usual}",
        "Lower the learning rate, or accumulate gradients of more rows (gradient_accumulation_steps).",
    ),
    "gradient-norm-large": NoteKind(
        "step {step}: the norm of the gradients is {value}",
        "Clip gradients (max_grad_norm=1.0), or lower the learning rate.",
    ),
    "gradient-norm-jump": NoteKind(
        "step {step}: the norm of the gradients jumped to {value}, from {usual} in the steps before",
        "Clip gradients (max_grad_norm=1.0), and look at the rows of this batch.",
    ),
    "dead-adapters": NoteKind(
        "{count} adapters have learned nothing in {step} steps: their B is zero and gets no gradient ({subject})",
        "Leave out target modules that the model does not call in training, and see that the loss depends on them.",
    ),
    "loader-slow": NoteKind(
        "step {step}: {value} of a step's time passes between two steps, while the device waits",
        "Give the data loader workers (dataloader_num_workers=4), tokenize before training, and save or log less "
        "often.",
    ),
    "memory-near-budget": NoteKind(
        "step {step}: the peak of memory is {value} of its budget",
        "Nothing, as long as batches do not grow: the plan is made again then. Leave more room by a smaller memory=.",
    ),
}
