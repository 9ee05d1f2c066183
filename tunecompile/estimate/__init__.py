"""What a training step would take, without running it: on one GPU, or on several."""
