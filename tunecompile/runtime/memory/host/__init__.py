"""Where offloaded tensors are: pinned host memory, and files behind it."""
