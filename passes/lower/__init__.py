"""Ops to providers, on the forward and the backward graph. No file here names a model."""
