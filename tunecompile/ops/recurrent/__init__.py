"""Recurrent operations over tokens: delta rules, state spaces, the short convolutions before them, and their rows."""

from tunecompile.ops.recurrent.branches import branch_rows, first_copies
from tunecompile.ops.recurrent.channel_delta_rule import channel_delta_rule
from tunecompile.ops.recurrent.gated_delta_rule import gated_delta_rule
from tunecompile.ops.recurrent.selective_scan import selective_scan
from tunecompile.ops.recurrent.short_convolution import short_convolution
from tunecompile.ops.recurrent.ssd_scan import ssd_scan

__all__ = [
    "branch_rows",
    "channel_delta_rule",
    "first_copies",
    "gated_delta_rule",
    "selective_scan",
    "short_convolution",
    "ssd_scan",
]
