"""The torch.compile backend: pass manager, partitioner, plugins, and the caches of compiled code and measured choices."""
