"""Sizes that come with batches are rounded up, so that shapes recur: rows without padding, and patches of towers."""
