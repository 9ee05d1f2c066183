"""Rollouts: `generate` of the model that trains, one recording for each token of all rows."""
