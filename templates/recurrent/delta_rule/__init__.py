"""The gated delta rule, and state spaces as the same without the delta, in chunks of 64 tokens."""

from tunecompile.templates.recurrent.delta_rule.backward_pass import backward
from tunecompile.templates.recurrent.delta_rule.forward_pass import forward
