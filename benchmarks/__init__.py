"""Measurements: kernels, training steps, suites of other projects, and the tables made of their results."""
