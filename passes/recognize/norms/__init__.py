"""Norms in their spellings, modulated ones, and the residual sums before them."""
