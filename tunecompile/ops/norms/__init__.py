"""Norms over the last dimension, alone and of a residual sum, modulated or not."""
