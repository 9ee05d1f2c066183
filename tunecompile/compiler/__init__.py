"""The torch.compile backend: pass manager, partitioner, plugins, caches of compiled code and measured choices."""
