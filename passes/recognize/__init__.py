"""Replace torch subgraphs by ops. Each file is one op family, with its patterns in plain PyTorch."""
