"""The only place that touches private names of torch, one file a topic. Checked on torch 2.11, 2.13 and 2.15. Knows nothing of the rest of the project."""
