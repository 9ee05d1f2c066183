"""Kernels that go from token to token: delta rules, and state spaces."""
