"""Replace torch subgraphs by ops. Each file is one op family, with its patterns in plain PyTorch."""

from tunecompile.passes.recognize.attention import PASS as attention
from tunecompile.passes.recognize.causal_attention import ONE_QUERY as one_query_attention
from tunecompile.passes.recognize.causal_attention import PASS as causal_attention
from tunecompile.passes.recognize.document_attention import PASS as document_attention
from tunecompile.passes.recognize.dora import PASS as dora
from tunecompile.passes.recognize.experts import (
    expert_biases,
    expert_masks,
    expert_rows,
    experts,
    sort_keys,
    weighted_gate,
)
from tunecompile.passes.recognize.grouped_linear import PASS as grouped_linear
from tunecompile.passes.recognize.linear_cross_entropy import PASS as linear_cross_entropy
from tunecompile.passes.recognize.lora import PASS as lora
from tunecompile.passes.recognize.lora_mlp import PASS as lora_mlp
from tunecompile.passes.recognize.lora_nf4 import PASS as lora_nf4
from tunecompile.passes.recognize.nf4 import FEW_ROWS as linear_4bit
from tunecompile.passes.recognize.nf4 import PASS as nf4
from tunecompile.passes.recognize.norms import (
    add_layer_norm,
    add_modulated_norm,
    add_rms_norm,
    layer_norm,
    modulated_norm,
    rms_norm,
)
from tunecompile.passes.recognize.rope import PASS as rope
from tunecompile.passes.recognize.swiglu import PASS as swiglu
