"""`tunecompile plan`: which engine, how many GPUs and what batch a fine-tuning takes, from a model's config alone and without a GPU."""
