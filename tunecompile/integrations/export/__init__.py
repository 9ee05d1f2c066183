"""Merged weights and adapters as files: safetensors, GGUF."""
