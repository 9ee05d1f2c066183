"""Attention in a graph, however it is written: calls of torch's function, and scores, softmax and product apart."""

from tunecompile.compiler.attention_calls.calls import (
    attention_arguments,
    attention_calls,
    causal_calls,
    document_mask_of,
    unrepeated,
    unrepeated_pair,
    views_behind,
)
from tunecompile.compiler.attention_calls.found import LOWEST, AttentionArguments, FoundAttention, Term
from tunecompile.compiler.attention_calls.weights import leave_out_weights
from tunecompile.compiler.attention_calls.written_out import read_written_out, written_out_attention
