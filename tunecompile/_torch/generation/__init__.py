"""What Inductor does differently while it generates code for a layer."""
