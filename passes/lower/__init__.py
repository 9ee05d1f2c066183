"""Ops to providers, on the forward and the backward graph. No file here names a model."""

from tunecompile.passes.lower.attention_by_heads import PASS as attention_by_heads
from tunecompile.passes.lower.choose_provider import PASS as choose_provider
from tunecompile.passes.lower.cleanup import PASS as cleanup
from tunecompile.passes.lower.gather_rows import PASS as gather_rows
from tunecompile.passes.lower.grouped_operands import PASS as grouped_operands
from tunecompile.passes.lower.kernel_operands import PASS as kernel_operands
