"""A process that generates code while the training runs, and what the two say to each other."""
