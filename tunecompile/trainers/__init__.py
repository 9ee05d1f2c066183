"""Doors of other people's trainers: each optimizes the model that its host trains, by the host's own extensions."""
