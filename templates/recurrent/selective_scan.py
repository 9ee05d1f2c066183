"""Mamba-1's scan (arXiv:2312.00752) in chunks of 32 tokens, forward and backward.

``chunk_ends`` computes what each chunk adds to the state that enters it, ``starts`` goes from chunk to chunk, and
``outputs`` computes the results of all chunks at once. Backward, the same is done from the last token to the first with
gradients of states; then ``gradients`` has the states of a chunk's tokens, and their gradients, in registers.

States are fp32. Between chunks they lie in memory: N / 32 of an input for each token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import _tiles
from .._launch import launch, next_power_of_2, row_ranges

__all__ = ["CHUNK", "backward", "chunk_ends", "forward", "gradients", "outputs", "starts"]

CHUNK = 32
CHANNELS = 256  #: whose parts of the gradients of b and c are summed by one program


@triton.jit
def decay_of(rate, a, documents, row, token, T, HAS_DOCUMENTS: tl.constexpr):
    """The decay into a token, [D, N]: 0 where a document begins."""
    made = tl.exp(rate[:, None] * a)
    if HAS_DOCUMENTS:
        mine = tl.load(documents + tl.minimum(token, T - 1))
        before = tl.load(documents + tl.maximum(tl.minimum(token, T) - 1, 0))
        made = tl.where((mine == before) & (token > 0), made, 0.0)
    return made


@triton.jit
def chunk_ends_kernel(
    x,
    dt,
    a,
    b,
    documents,
    out,
    total,
    T,
    NT,
    D,
    REVERSE: tl.constexpr,
    N: tl.constexpr,
    STATES: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """Program: a chunk of BLOCK channels. REVERSE: x is the gradient of the results, b is c; else dt is summed, too."""
    row, chunk = tl.program_id(0) // NT, tl.program_id(0) % NT
    channel, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATES)
    there, both = channel < D, (channel < D)[:, None] & (n < N)[None, :]
    rates = tl.load(a + channel[:, None] * N + n[None, :], mask=both, other=0.0).to(tl.float32)
    state = tl.zeros((BLOCK, STATES), dtype=tl.float32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(0, C):
        token = chunk * C + step
        if REVERSE:
            token = chunk * C + C - 1 - step
        inside = channel < tl.where(token < T, D, 0)
        place = row.to(tl.int64) * T + token
        value = tl.load(x + place * D + channel, mask=inside, other=0.0).to(tl.float32)
        rate = tl.load(dt + place * D + channel, mask=inside, other=0.0).to(tl.float32)
        row_b = tl.load(b + place * N + n, mask=n < tl.where(token < T, N, 0), other=0.0).to(tl.float32)
        decay = decay_of(rate, rates, documents, row, token, T, HAS_DOCUMENTS)
        if REVERSE:
            state = (state + value[:, None] * row_b[None, :]) * decay
        else:
            state = state * decay + (rate * value)[:, None] * row_b[None, :]
            sums += rate
    at = (row * NT + chunk).to(tl.int64) * D + channel
    tl.store(out + at[:, None] * N + n[None, :], state, mask=both)
    if not REVERSE:
        tl.store(total + at, sums, mask=there)


@triton.jit
def starts_kernel(
    states,
    total,
    a,
    documents,
    last,
    final,
    T,
    NT,
    D,
    REVERSE: tl.constexpr,
    N: tl.constexpr,
    STATES: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """Program: BLOCK channels of a row. `states` has what chunks add, and then what enters them.

    last: REVERSE, the gradient of the final state, or None. final: else, where the final state goes, or None.
    """
    row = tl.program_id(0)
    channel, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATES)
    there, both = channel < D, (channel < D)[:, None] & (n < N)[None, :]
    cell = channel[:, None] * N + n[None, :]
    rates = tl.load(a + cell, mask=both, other=0.0).to(tl.float32)
    state = tl.zeros((BLOCK, STATES), dtype=tl.float32)
    if REVERSE:
        state = tl.load(last + row.to(tl.int64) * D * N + cell, mask=both, other=0.0).to(tl.float32)
    for step in range(0, NT):
        chunk = step
        if REVERSE:
            chunk = NT - 1 - step
        at = (row * NT + chunk).to(tl.int64) * D
        added = tl.load(states + at * N + cell, mask=both, other=0.0)
        tl.store(states + at * N + cell, state, mask=both)
        through = tl.exp(tl.load(total + at + channel, mask=there, other=0.0)[:, None] * rates)
        if HAS_DOCUMENTS:
            before = tl.load(documents + tl.maximum(chunk * C - 1, 0))
            behind = tl.load(documents + tl.minimum(chunk * C + C, T) - 1)
            through = tl.where((before == behind) & (chunk > 0), through, 0.0)
        state = state * through + added
    if not REVERSE:
        tl.store(final + row.to(tl.int64) * D * N + cell, state, mask=both)


@triton.jit
def outputs_kernel(
    x,
    dt,
    a,
    b,
    c,
    documents,
    states,
    out,
    T,
    NT,
    D,
    N: tl.constexpr,
    STATES: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """Program: the results of a chunk, of BLOCK channels."""
    row, chunk = tl.program_id(0) // NT, tl.program_id(0) % NT
    channel, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATES)
    both = (channel < D)[:, None] & (n < N)[None, :]
    cell = channel[:, None] * N + n[None, :]
    rates = tl.load(a + cell, mask=both, other=0.0).to(tl.float32)
    state = tl.load(states + (row * NT + chunk).to(tl.int64) * D * N + cell, mask=both, other=0.0)
    for step in range(0, C):
        token = chunk * C + step
        inside, known = channel < tl.where(token < T, D, 0), n < tl.where(token < T, N, 0)
        place = row.to(tl.int64) * T + token
        value = tl.load(x + place * D + channel, mask=inside, other=0.0).to(tl.float32)
        rate = tl.load(dt + place * D + channel, mask=inside, other=0.0).to(tl.float32)
        row_b = tl.load(b + place * N + n, mask=known, other=0.0).to(tl.float32)
        row_c = tl.load(c + place * N + n, mask=known, other=0.0).to(tl.float32)
        decay = decay_of(rate, rates, documents, row, token, T, HAS_DOCUMENTS)
        state = state * decay + (rate * value)[:, None] * row_b[None, :]
        made = tl.sum(state * row_c[None, :], 1)
        tl.store(out + place * D + channel, made.to(out.dtype.element_ty), mask=inside)


@triton.jit
def joined(decay, value, decay_next, value_next):
    """Two steps of x -> decay x + value, as one."""
    return decay * decay_next, decay_next * value + value_next


@triton.jit
def gradients_kernel(
    grad,
    x,
    dt,
    a,
    b,
    c,
    documents,
    states,
    ahead,
    dx,
    ddt,
    da,
    db,
    dc,
    T,
    NT,
    D,
    N: tl.constexpr,
    STATES: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    WITH_A: tl.constexpr,
):
    """Program: a chunk of CHANNELS channels, BLOCK of them at a time; db and dc are sums over these channels."""
    row, chunk, group = tl.program_id(0) // NT, tl.program_id(0) % NT, tl.program_id(1)
    i, n = tl.arange(0, C), tl.arange(0, STATES)
    token = chunk * C + i
    place = row.to(tl.int64) * T + token
    known = (token < T)[:, None] & (n < N)[None, :]
    rows_b = tl.load(b + place[:, None] * N + n[None, :], mask=known, other=0.0).to(tl.float32)[:, None, :]
    rows_c = tl.load(c + place[:, None] * N + n[None, :], mask=known, other=0.0).to(tl.float32)[:, None, :]
    mine = tl.full((C,), 1.0, dtype=tl.float32)  # whether a token goes on with the document before it
    after = tl.full((C,), 1.0, dtype=tl.float32)
    if HAS_DOCUMENTS:
        number = tl.load(documents + tl.minimum(token, T - 1))
        before = tl.load(documents + tl.maximum(tl.minimum(token, T) - 1, 0))
        behind = tl.load(documents + tl.minimum(token + 1, T - 1))
        mine = tl.where((number == before) & (token > 0), 1.0, 0.0)
        after = tl.where(number == behind, 1.0, 0.0)
    to_b = tl.zeros((C, STATES), dtype=tl.float32)
    to_c = tl.zeros((C, STATES), dtype=tl.float32)
    for begin in range(0, tl.minimum(CHANNELS, D - group * CHANNELS), BLOCK):
        channel = group * CHANNELS + begin + tl.arange(0, BLOCK)
        there, both = channel < D, (channel < D)[:, None] & (n < N)[None, :]
        inside = (token < T)[:, None] & there[None, :]
        cell = channel[:, None] * N + n[None, :]
        at = (row * NT + chunk).to(tl.int64) * D * N + cell
        where = place[:, None] * D + channel[None, :]
        value = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
        rate = tl.load(dt + where, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(grad + where, mask=inside, other=0.0).to(tl.float32)
        next_inside = (i + 1 < C)[:, None] & (token + 1 < T)[:, None] & there[None, :]
        rate_next = tl.load(dt + where + D, mask=next_inside, other=0.0).to(tl.float32)
        rates = tl.load(a + cell, mask=both, other=0.0).to(tl.float32)
        entering = tl.load(states + at, mask=both, other=0.0)
        leaving = tl.load(ahead + at, mask=both, other=0.0)
        # states of all tokens: the state that enters comes in with the first
        decay = tl.exp(rate[:, :, None] * rates[None, :, :]) * mine[:, None, None]
        added = (rate * value)[:, :, None] * rows_b
        first = (i == 0)[:, None, None]
        _, state = tl.associative_scan((decay, added + tl.where(first, decay * entering[None, :, :], 0.0)), 0, joined)
        # their gradients: that of the state that leaves comes in with the last
        decay_next = tl.exp(rate_next[:, :, None] * rates[None, :, :])
        decay_next = tl.where((i + 1 < C)[:, None, None], decay_next * after[:, None, None], 1.0)
        passed = given[:, :, None] * rows_c + tl.where((i == C - 1)[:, None, None], leaving[None, :, :], 0.0)
        _, back = tl.associative_scan((decay_next, passed), 0, joined, reverse=True)
        to_c += tl.sum(given[:, :, None] * state, 1)
        to_b += tl.sum(back * (rate * value)[:, :, None], 1)
        to_added = tl.sum(back * rows_b, 2)
        by_decay = back * (state - added)  # the state before, decayed
        tl.store(dx + where, (to_added * rate).to(dx.dtype.element_ty), mask=inside)
        to_rate = to_added * value + tl.sum(by_decay * rates[None, :, :], 2)
        tl.store(ddt + where, to_rate.to(ddt.dtype.element_ty), mask=inside)
        if WITH_A:
            tl.store(da + at, tl.sum(by_decay * rate[:, :, None], 0), mask=both)
    part = (group.to(tl.int64) * tl.num_programs(0) // NT + row) * T + token
    tl.store(db + part[:, None] * N + n[None, :], to_b, mask=known)
    tl.store(dc + part[:, None] * N + n[None, :], to_c, mask=known)


def _options(kernel, x, a, documents):
    """(Channels of a program, constants of a kernel)."""
    tile = _tiles.pick(kernel, x, a.shape[1])
    options = dict(N=a.shape[1], STATES=next_power_of_2(a.shape[1]), C=CHUNK, HAS_DOCUMENTS=documents is not None)
    return tile.block, dict(options, BLOCK=tile.block, num_warps=tile.num_warps, num_stages=tile.num_stages)


def _chunks(tokens):
    return (tokens + CHUNK - 1) // CHUNK


def _parts(count, states, a):
    """[count, D, N] for a kernel that writes all of it; of zeros, and at least two, where `count` is a symbol."""
    make = torch.empty if isinstance(count, int) else torch.zeros
    return make(row_ranges(count, 1), *a.shape, dtype=states.dtype, device=states.device)


def chunk_ends(x, dt, a, b, documents=None, reverse=False):
    """Compute what each chunk adds to the state after it; reverse, to the gradient of the state before it.

    Args:
        x: [B, T, D]; reverse, the gradient of the results.
        dt, a, documents: those of `forward`.
        b: [B, T, N]; reverse, c.
        reverse: whether tokens are taken from the last to the first.

    Returns:
        ([B, chunks * D, N] in fp32, the sum of each chunk's dt, [B, chunks * D], or None for reverse).
    """
    (batch, tokens, channels), count = x.shape, _chunks(x.shape[1])
    made = torch.empty(batch, count * channels, a.shape[1], dtype=torch.float32, device=x.device)
    total = None if reverse else torch.empty(batch, count * channels, dtype=torch.float32, device=x.device)
    block, options = _options("scan_ends", x, a, documents)
    grid = (batch * count, triton.cdiv(channels, block))
    sizes = (tokens, count, channels)
    launch(chunk_ends_kernel, grid, x, dt, a, b, documents, made, total, *sizes, REVERSE=reverse, **options)
    return made, total


def starts(states, total, a, documents, tokens, last=None):
    """Go from chunk to chunk. `states` has what chunks add, and then what enters them (or, backward, leaves them).

    Args:
        states, total: from `chunk_ends`; total from the forward's.
        a, documents: those of `forward`.
        tokens: of a row.
        last: the gradient of the final state, [B, D, N], contiguous, to go backward; None to go forward.

    Returns:
        The final state, [B, D, N] in fp32; None backward.
    """
    batch, count, channels = states.shape[0], _chunks(tokens), a.shape[0]
    final = torch.empty(batch, *a.shape, dtype=states.dtype, device=states.device) if last is None else None
    block, options = _options("scan_starts", states, a, documents)
    grid = (batch, triton.cdiv(channels, block))
    tensors = (states, total, a, documents, last, final)
    launch(starts_kernel, grid, *tensors, tokens, count, channels, REVERSE=last is not None, **options)
    return final


def outputs(x, dt, a, b, c, documents, states):
    """Compute the results of all tokens from the states that enter chunks.

    Args:
        x, dt, a, b, c, documents: those of `forward`.
        states: from `starts`.

    Returns:
        [B, T, D] in x's dtype.
    """
    (batch, tokens, channels), count = x.shape, _chunks(x.shape[1])
    made = torch.empty_like(x)
    block, options = _options("scan_outputs", x, a, documents)
    grid = (batch * count, triton.cdiv(channels, block))
    launch(outputs_kernel, grid, x, dt, a, b, c, documents, states, made, tokens, count, channels, **options)
    return made


def gradients(grad, x, dt, a, b, c, documents, states, ahead, with_a=True):
    """Compute the gradients of all operands within chunks.

    Args:
        grad: of the results.
        x, dt, a, b, c, documents: those of `forward`.
        states: that enter chunks.
        ahead: gradients of the states that leave chunks.
        with_a: whether the gradient of a is wanted.

    Returns:
        (dx, ddt, da, db, dc): da a part for each chunk, [parts, D, N], or None, of which there may be one more, of
        zeros; db and dc a part for each group of channels, [groups, B, T, N], in fp32.
    """
    (batch, tokens, channels), count = x.shape, _chunks(x.shape[1])
    groups = triton.cdiv(channels, CHANNELS)
    dx, ddt = torch.empty_like(x), torch.empty_like(dt)
    da = _parts(batch * count, states, a) if with_a else None
    db, dc = (torch.empty(groups, *b.shape, dtype=torch.float32, device=x.device) for _ in range(2))
    _, options = _options("scan_gradients", x, a, documents)
    tensors = (grad, x, dt, a, b, c, documents, states, ahead, dx, ddt, da, db, dc)
    sizes = (tokens, count, channels)
    launch(gradients_kernel, (batch * count, groups), *tensors, *sizes, CHANNELS=CHANNELS, WITH_A=with_a, **options)
    return dx, ddt, da, db, dc


def forward(x, dt, a, b, c, documents=None):
    """Mamba-1's scan, from a state of 0.

    Args:
        x: [B, T, D], contiguous, any floating dtype.
        dt: as x, in any floating dtype.
        a: [D, N], contiguous, at most 0.
        b, c: [B, T, N], contiguous.
        documents: the number of each token's document, int [T], for B = 1; or None.

    Returns:
        (y [B, T, D] in x's dtype, the final state [B, D, N] in fp32).
    """
    states, total = chunk_ends(x, dt, a, b, documents)
    final = starts(states, total, a, documents, x.shape[1])
    return outputs(x, dt, a, b, c, documents, states), final


def backward(grad, grad_final, x, dt, a, b, c, documents=None, *, with_a=True):
    """The gradients of `forward`.

    Args:
        grad: of y, contiguous.
        grad_final: of the final state, [B, D, N], contiguous.
        x, dt, a, b, c, documents: as given to `forward`.
        with_a: whether the gradient of a is wanted.

    Returns:
        [dx, ddt, da, db, dc]: da in fp32, or None; db and dc in fp32.
    """
    states, total = chunk_ends(x, dt, a, b, documents)
    starts(states, total, a, documents, x.shape[1])
    ahead, _ = chunk_ends(grad, dt, a, c, documents, reverse=True)
    starts(ahead, total, a, documents, x.shape[1], grad_final)
    dx, ddt, da, db, dc = gradients(grad, x, dt, a, b, c, documents, states, ahead, with_a)
    return [dx, ddt, None if da is None else da.sum(0), db.sum(0), dc.sum(0)]
