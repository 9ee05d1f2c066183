"""The delta rule with a decay for each channel of the key, in chunks of 64 tokens."""

from tunecompile.templates.recurrent.channel_rule.backward_pass import backward
from tunecompile.templates.recurrent.channel_rule.forward_pass import forward
