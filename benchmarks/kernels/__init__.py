"""Templates beside their references under Inductor and other projects' kernels, a file an op family."""
