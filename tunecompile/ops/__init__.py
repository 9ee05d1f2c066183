"""The semantic ops in plain PyTorch: one file per op family, and no kernels.

Each function defines what its op computes. The backward is a separate op in the same file. In the docstrings a shape
[T, K] has T tokens; "any floating dtype" is bf16, fp16, fp32 or fp64; a gradient has the shape and dtype of its tensor.
`tunecompile.op` documents how an op is made."""

from tunecompile.ops.attention.branches import branch_attention
from tunecompile.ops.attention.causal import causal_attention, one_query_attention
from tunecompile.ops.attention.documents import document_mask, varlen_attention
from tunecompile.ops.attention.dropout import dropout_attention
from tunecompile.ops.dora import adapted_norm
from tunecompile.ops.experts.adapted_stack import adapted_stack
from tunecompile.ops.experts.gathered import gathered_lora_linear, gathered_lora_linear_backward, sum_rows
from tunecompile.ops.experts.grouped_linear import grouped_lora_linear
from tunecompile.ops.experts.rows import collect_rows, inverse_order, spread_rows
from tunecompile.ops.linear_cross_entropy import linear_cross_entropy
from tunecompile.ops.linear_cross_entropy_rows import linear_cross_entropy_rows
from tunecompile.ops.lora import lora_linear
from tunecompile.ops.lora_mlp import lora_mlp
from tunecompile.ops.lora_mlp_tiled import lora_mlp_tiled
from tunecompile.ops.nf4 import dequantize_4bit
from tunecompile.ops.norms.layer_norm import add_layer_norm, layer_norm
from tunecompile.ops.norms.modulated_norm import add_modulated_norm, modulated_norm
from tunecompile.ops.norms.rms_norm import add_rms_norm, rms_norm
from tunecompile.ops.packed.experts import packed_experts
from tunecompile.ops.packed.few_rows import linear_4bit
from tunecompile.ops.packed.fp8_blocks import dequantize_fp8_blocks
from tunecompile.ops.packed.mxfp4 import dequantize_mxfp4
from tunecompile.ops.recurrent.branches import branch_rows, first_copies
from tunecompile.ops.recurrent.channel_delta_rule import channel_delta_rule
from tunecompile.ops.recurrent.gated_delta_rule import gated_delta_rule
from tunecompile.ops.recurrent.selective_scan import selective_scan
from tunecompile.ops.recurrent.short_convolution import short_convolution
from tunecompile.ops.recurrent.ssd_scan import ssd_scan
from tunecompile.ops.rope import rope
from tunecompile.ops.swiglu import clamped_gate, gated_activation, weighted_gate
