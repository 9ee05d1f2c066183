"""Memory planning as pure functions: graphs, bytes and milliseconds in, a plan for each layer out. No model is seen."""
