"""Masks that layers are given: found among arguments, read, and recorded in place of being made."""
