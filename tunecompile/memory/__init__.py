"""Memory as a budget in bytes: what each layer keeps, computes again or moves to the host, so that the fastest step fits."""
