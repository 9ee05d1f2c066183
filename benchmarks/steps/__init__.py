"""Training steps of whole models: speed, memory and gradients, beside other systems."""
