"""The report of an optimized model, its graphs before and after, and its memory over a step."""
