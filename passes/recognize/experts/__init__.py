"""Mixtures of experts: grouped products, biases, and the copies of tokens to experts and back."""
