"""Device functions of the kernels of both delta rules: places of a chunk's tokens, its blocks, and its documents.

A row has T tokens in NT chunks of C, with H heads, keys of K and values of V columns. `token` and `place` are of a
chunk's tokens: their numbers in the row, and in a contiguous [B, T, H].

None of them loads what a store's address is computed from: torch's analysis of what a kernel writes takes all arguments
of such a call for written.
"""

import triton
import triton.language as tl

__all__ = [
    "chunk_of_program",
    "documents_at",
    "edges_of",
    "exp_where",
    "inverse_of",
    "load_block",
    "pairs_of",
    "place_of",
    "products_of",
    "row_of",
    "state_at",
    "store_block",
]


@triton.jit
def place_of(row, token, head, T, H: tl.constexpr):
    """Numbers of tokens of a head in a contiguous [B, T, H]."""
    return (row.to(tl.int64) * T + token) * H + head


@triton.jit
def chunk_of_program(NT, C: tl.constexpr):
    """(Row, head, first token, tokens) of the chunk of a program (row and chunk, head, ...)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first = chunk % NT * C
    return chunk // NT, head, first, first + tl.arange(0, C)


@triton.jit
def row_of(tensor, row, head, token, stride_row, stride_token, stride_head):
    """Pointers [C, 1] to the values of tokens, for one head of [B, T, H, ...]."""
    tensor += row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
    return (tensor + token.to(tl.int64) * stride_token)[:, None]


@triton.jit
def load_block(rows, begin, column, there, WIDTH: tl.constexpr):
    """Columns begin + `column` of rows of WIDTH values, of pointers [C, 1]: 0 for rows that are not `there`."""
    inside = there[:, None] & (begin + column < WIDTH)[None, :]
    return tl.load(rows + begin + column[None, :], mask=inside, other=0.0)


@triton.jit
def store_block(rows, begin, column, there, WIDTH: tl.constexpr, block):
    """Store what `load_block` loads."""
    inside = there[:, None] & (begin + column < WIDTH)[None, :]
    tl.store(rows + begin + column[None, :], block.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def state_at(states, number, head, begin, key, column, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Pointers to keys begin + `key` and columns of the state of a head, in [numbers, H, K, V]."""
    at = (number.to(tl.int64) * H + head) * K
    return states + (at + begin + key[:, None]) * V + column[None, :]


@triton.jit
def documents_at(documents, token, first, T, HAS_DOCUMENTS: tl.constexpr):
    """(The document of each token of a chunk, that of the token in front of it)."""
    mine = tl.zeros_like(token)
    before = 0
    if HAS_DOCUMENTS:
        mine = tl.load(documents + tl.minimum(token, T - 1))
        before = tl.load(documents + tl.maximum(first - 1, 0))
        before = tl.where(first > 0, before, -1)
    return mine, before


@triton.jit
def edges_of(documents, mine, before, first, T, C: tl.constexpr, HAS_DOCUMENTS: tl.constexpr):
    """Whether (each token sees the state that enters, the chunk's end sees it, the end sees the state that enters)."""
    behind = before
    if HAS_DOCUMENTS:
        behind = tl.load(documents + tl.minimum(first + C, T) - 1)
    return mine == before, mine == behind, behind == before


@triton.jit
def exp_where(known, x):
    """e^x, and 0 where it is not known: there x may overflow."""
    return tl.where(known, tl.exp(tl.where(known, x, 0.0)), 0.0)


@triton.jit
def pairs_of(total, mine, i, STRICT: tl.constexpr):
    """e^(G_i - G_j) if i sees j, else 0."""
    sees = (mine[:, None] == mine[None, :]) & (i[:, None] >= i[None, :])
    if STRICT:
        sees = sees & (i[:, None] != i[None, :])
    return exp_where(sees, total[:, None] - total[None, :])


@triton.jit
def products_of(queries, keys, key, there, K: tl.constexpr, C: tl.constexpr, KEYS: tl.constexpr, AMONG: tl.constexpr):
    """(q_i . k_j, k_i . k_j or 0) of a chunk's tokens, [C, C], from pointers to their rows."""
    against = tl.zeros((C, C), dtype=tl.float32)
    among = tl.zeros((C, C), dtype=tl.float32)
    for begin in range(0, K, KEYS):
        a = load_block(queries, begin, key, there, K)
        b = load_block(keys, begin, key, there, K)
        against += tl.dot(a, tl.trans(b))
        if AMONG:
            among += tl.dot(b, tl.trans(b))
    return against, among


@triton.jit
def inverse_of(system, i):
    """(I + A)^-1 of a strictly lower triangular A of 64 rows; it is rounded to half precision afterwards.

    It is built by joining blocks to 2, 4, ... 64 rows: T = T - T L T, where L is the part between two blocks. The
    product ``prod (I + A^(2^k))`` would cancel: repeated tokens give an A of ones, whose powers reach 10^17.
    """
    a, b = i[:, None], i[None, :]
    inverse = tl.where(a == b, 1.0, 0.0) - tl.where(a // 2 == b // 2, system, 0.0)
    for level in range(1, 6):  # two blocks of 2, 4, ... 32 rows are joined
        together = (a >> (level + 1)) == (b >> (level + 1))
        between = tl.where(together & ((a >> level) != (b >> level)), system, 0.0)
        step = tl.dot(inverse, between, input_precision="tf32")
        inverse -= tl.dot(step, inverse, input_precision="tf32")
    return inverse
