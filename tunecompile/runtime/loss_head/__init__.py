"""The head and the loss, joined wherever the loss is computed: in the model, in a trainer or in the user's own loop.

In a training step the head (`slot`) returns a deferred tensor, which holds the hidden states and the head to apply
(`deferred`, `logits`). Casts, views, slices, scales, soft-caps and log-softmax are recorded, and so are reductions of
each row (`log_probs`). A loss, or the log-probability of each token, turns the recorded chain (`logit_chain`) into
one op that never holds all logits (`losses`). Any other use computes the logits as if nothing had been deferred. A
request for the gradient at the logits is met, or refused with a reason (`gradients`)."""

from tunecompile.runtime.loss_head import gradients, log_probs, losses
from tunecompile.runtime.loss_head.slot import Head, HeadSlot
