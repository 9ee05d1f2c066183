"""The head and the loss, joined wherever the loss is computed: in the model, in a trainer or in the user's own loop.

In a training step the head (`slot`) returns a tensor that knows the hidden states and which head would be applied to them (`deferred`, `logits`).
Casts, views, slices, scales, soft-caps and log-softmax are recorded, and what is taken of each row as well (`rows`). Where a loss, or the
log-probability of each token, is made of them, the recorded chain (`chain`) becomes one op that never holds all logits (`losses`); any other use
computes the logits as if nothing had been deferred. Whoever asks for the gradient at logits gets it, or is told why not (`gradients`).
"""

from tunecompile.runtime.loss_head import gradients, log_probs, losses  # noqa: F401  they say which calls are recorded, and which are losses
from tunecompile.runtime.loss_head.slot import Head, HeadSlot

__all__ = ["Head", "HeadSlot"]
