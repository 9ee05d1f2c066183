"""Mixtures of experts: grouped products, biases, and the copies of tokens to experts and back."""

from tunecompile.passes.recognize.experts.biases import PASS as expert_biases
from tunecompile.passes.recognize.experts.masks import PASS as expert_masks
from tunecompile.passes.recognize.experts.products import PASS as experts
from tunecompile.passes.recognize.experts.rows import PASS as expert_rows
from tunecompile.passes.recognize.experts.sort_keys import PASS as sort_keys
from tunecompile.passes.recognize.experts.weighted_gate import PASS as weighted_gate
