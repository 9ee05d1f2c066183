"""The name `tunecompile` among transformers' implementations of attention and of experts.

    tunecompile.register()
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="tunecompile", experts_implementation="tunecompile"
    )

`optimize` recognises what models spell out, and needs neither name. They are for configurations that have these fields,
and for models that are not optimized.
"""

from tunecompile.errors import MissingExtra
from tunecompile.integrations.registered.names import NAME


def register() -> None:
    """Register `tunecompile` as an implementation of attention and of experts in transformers.

    From then on `from_pretrained`, configurations and `set_attn_implementation` take
    `attn_implementation="tunecompile"` and `experts_implementation="tunecompile"`. Attention with sinks or soft-capped
    scores is one op, where the batch has neither padding nor windows; other attention is torch's. Experts are products
    grouped by expert, as ops. Both run with and without `optimize`, which recognises them. `tunecompile run` calls this
    by itself. A second call does no harm.

    Raises:
        MissingExtra: transformers is not installed, or too old to have experts by name.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        from tunecompile.integrations.registered import functions
    except ImportError as missing:
        raise MissingExtra(what="tunecompile.register", package="transformers", extra="hf") from missing
    AttentionInterface.register(NAME, functions.attention)
    AttentionMaskInterface.register(NAME, functions.mask)
    ALL_EXPERTS_FUNCTIONS.register(NAME, functions.experts)
