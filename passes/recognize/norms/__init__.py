"""Norms in their spellings, modulated ones, and the residual sums before them."""

from tunecompile.passes.recognize.norms.add_rms_norm import PASS as add_rms_norm
from tunecompile.passes.recognize.norms.layer_norm import ADD as add_layer_norm
from tunecompile.passes.recognize.norms.layer_norm import PASS as layer_norm
from tunecompile.passes.recognize.norms.modulated_norm import ADD as add_modulated_norm
from tunecompile.passes.recognize.norms.modulated_norm import PASS as modulated_norm
from tunecompile.passes.recognize.norms.rms_norm import PASS as rms_norm
