"""What is supported: cells of the support matrix, tests of other packages, and every architecture of transformers."""
