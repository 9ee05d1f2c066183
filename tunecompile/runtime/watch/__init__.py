"""What is looked at around calls of layers: modules and hooks, graphs that run, values that are read late."""
