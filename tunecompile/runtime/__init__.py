"""All that runs in a training step: compiled layers, memory budgets, padding removal, CUDA graphs, the loss head."""
