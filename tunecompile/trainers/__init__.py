"""Doors: how tunecompile is switched on in trainers of other people's."""
