"""The semantic ops in plain PyTorch: one file per op family, and no kernels.

Each function defines what its op computes. The backward is a separate op in the same file. In the docstrings a shape
[T, K] has T tokens; "any floating dtype" is bf16, fp16, fp32 or fp64; a gradient has the shape and dtype of its tensor.
`tunecompile.op` documents how an op is made."""

from tunecompile.ops.attention import (
    branch_attention,
    causal_attention,
    document_mask,
    one_query_attention,
    varlen_attention,
)
from tunecompile.ops.dora import adapted_norm
from tunecompile.ops.experts import (
    adapted_stack,
    collect_rows,
    gathered_lora_linear,
    gathered_lora_linear_backward,
    grouped_lora_linear,
    inverse_order,
    spread_rows,
    sum_rows,
)
from tunecompile.ops.linear_cross_entropy import linear_cross_entropy
from tunecompile.ops.linear_cross_entropy_rows import linear_cross_entropy_rows
from tunecompile.ops.lora import lora_linear
from tunecompile.ops.lora_mlp import lora_mlp
from tunecompile.ops.lora_mlp_tiled import lora_mlp_tiled
from tunecompile.ops.lora_nf4 import lora_linear_nf4
from tunecompile.ops.nf4 import dequantize_4bit
from tunecompile.ops.norms import add_layer_norm, add_modulated_norm, add_rms_norm, layer_norm, modulated_norm, rms_norm
from tunecompile.ops.packed import dequantize_fp8_blocks, dequantize_mxfp4
from tunecompile.ops.packed.few_rows import linear_4bit
from tunecompile.ops.recurrent import (
    branch_rows,
    channel_delta_rule,
    first_copies,
    gated_delta_rule,
    selective_scan,
    short_convolution,
    ssd_scan,
)
from tunecompile.ops.rope import rope
from tunecompile.ops.swiglu import clamped_gate, gated_activation, weighted_gate
