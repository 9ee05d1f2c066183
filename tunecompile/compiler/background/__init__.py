"""Processes that generate code while the training runs, and what is said between them and it."""
