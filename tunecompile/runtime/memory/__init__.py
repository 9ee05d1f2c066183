"""Memory at run time: budgets, offload to host and disk, recovery from out of memory."""
