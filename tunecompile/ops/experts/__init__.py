"""Mixtures of experts: products grouped by expert, adapters over stacks of weights, rows on their way to experts.

An expert is one matrix of a stack [E, ...]. A row is a token for one of its experts. Rows are sorted by expert, and
`offsets` holds the end of each expert's rows. Rows behind the last offset belong to no expert."""

from tunecompile.ops.experts.adapted_stack import adapted_stack
from tunecompile.ops.experts.gathered import gathered_lora_linear, gathered_lora_linear_backward, sum_rows
from tunecompile.ops.experts.grouped_linear import grouped_lora_linear
from tunecompile.ops.experts.rows import collect_rows, inverse_order, spread_rows

__all__ = [
    "adapted_stack",
    "collect_rows",
    "gathered_lora_linear",
    "gathered_lora_linear_backward",
    "grouped_lora_linear",
    "inverse_order",
    "spread_rows",
    "sum_rows",
]
