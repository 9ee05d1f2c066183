"""Estimates of memory and time of a training step, on one GPU or on several, without running it."""
