"""Launch-bound layers are captured as CUDA graphs and replayed."""
