"""Trained models as files: adapters merged into 16-bit weights (`folder`), and these as GGUF (`gguf`)."""
