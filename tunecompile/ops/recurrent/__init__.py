"""Recurrent operations over tokens: delta rules, state spaces, the short convolutions before them, and their rows."""
