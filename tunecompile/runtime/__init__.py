"""What runs in a training step: regions, their compiled variants, memory budgets, padding removal, CUDA graphs, the loss head."""
