"""Attention: of documents in one row, of branches that share a prefix, causal with wide heads, and of one query."""

from tunecompile.ops.attention.branches import branch_attention
from tunecompile.ops.attention.causal import causal_attention, one_query_attention
from tunecompile.ops.attention.documents import document_mask, refuse_attention, varlen_attention

__all__ = [
    "branch_attention",
    "causal_attention",
    "document_mask",
    "one_query_attention",
    "refuse_attention",
    "varlen_attention",
]
