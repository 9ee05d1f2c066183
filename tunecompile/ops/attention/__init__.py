"""Attention: of documents in one row, of branches that share a prefix, causal with wide heads, and of one query."""
