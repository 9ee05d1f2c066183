"""Whether a layer treats each token by itself, so that it may run on documents in the place of rows."""
