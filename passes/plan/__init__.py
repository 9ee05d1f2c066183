"""Passes on the joint graph: casts, tiles, recomputation, a report on providers. No file names a model or op family."""
