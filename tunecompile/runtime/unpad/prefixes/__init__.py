"""Prefixes that rows share: each is computed once, as a document that other documents go on from."""
