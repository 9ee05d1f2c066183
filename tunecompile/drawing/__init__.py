"""What the compiler made of a model, as a page: the graph of a layer as it came beside the one with ops, and all that the report knows."""
