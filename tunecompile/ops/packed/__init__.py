"""Weights as checkpoints hold them in 4 or 8 bits, other than those of bitsandbytes (`tunecompile.ops.nf4`)."""
