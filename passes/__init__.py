"""The compiler, left to right: the order of the passes, and nothing but the order."""

from tunecompile.passes import lower, plan, recognize

PIPELINE = [
    recognize.linear_cross_entropy,  # widest first: a narrow rewrite must not eat a wide one's anchor
    recognize.nf4, recognize.lora, recognize.grouped_linear,  # base, then base + adapter, then siblings that share x
    recognize.lora_nf4,  # and all of them as one, where a template can write the weights where they are read
    recognize.rope, recognize.rms_norm, recognize.add_rms_norm, recognize.swiglu,  # the sum that ends a rotation is not a residual, if it is normed
    recognize.lora_mlp,  # gate|up, activation and down as one, where a template joins their backward
    plan.tile, plan.remat, plan.providers,
    lower.choose_provider, lower.attention_by_heads, lower.cleanup,
]
