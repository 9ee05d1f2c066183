"""What was found, rewritten and refused, and why; graphs before and after; memory over a step."""
