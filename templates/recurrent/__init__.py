"""Kernels that go from token to token: delta rules, and state spaces."""

from tunecompile.templates import lazily

__getattr__ = lazily(__name__)
