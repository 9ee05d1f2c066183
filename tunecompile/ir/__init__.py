"""Intermediate representation: ops as objects, one spelling for each operation, subgraph matching and rewriting."""
