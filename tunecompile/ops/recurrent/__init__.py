"""Operations that carry something from token to token: delta rules, and the convolutions in front of them."""

from tunecompile.ops.recurrent.gated_delta_rule import gated_delta_rule
from tunecompile.ops.recurrent.short_convolution import short_convolution

__all__ = ["gated_delta_rule", "short_convolution"]
