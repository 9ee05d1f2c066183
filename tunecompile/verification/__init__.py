"""Checks against eager and fp32: of one training step, and of a pass under development."""
