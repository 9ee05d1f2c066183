"""Tile sizes by kernel, architecture, dtype and shape bucket: a table, so that launches need no measurement.

Rows are tried in order and the first that fits wins. ``shared`` is the least shared memory that a program
of the card may take, in bytes, ``itemsize`` the bytes of an element of the large tensor, ``upto`` the
largest size (whatever size the kernel's file names) of the bucket; None fits all. A new measurement is a
new row.
"""

from typing import NamedTuple

import torch

from tunecompile._torch import card

__all__ = ["TABLE", "Tile", "TileRow", "find", "pick"]

LARGE = 232448  #: bytes of shared memory of Hopper's and Blackwell's data centre cards
THREADS = 1024  #: of a program, at most


class Tile(NamedTuple):
    """What one program of a kernel computes, and with how many warps."""

    block: int  #: elements along the contiguous dimension; 0: all
    rows: int = 1  #: rows
    num_warps: int = 4  #: warps of 32 threads; of 64 on AMD's data center cards, at most 16
    num_stages: int = 1  #: stages of software pipelining, in a loop
    step: int = 1  #: rows at a time, where a program loops over them


class TileRow(NamedTuple):
    """A tile, and the launches for which it is used."""

    tile: Tile  #: the tile
    shared: int = 0  #: the least shared memory of a program, in bytes: others take later rows, which fit 64 KiB
    itemsize: int | None = None  #: bytes an element of the large tensor; None: any
    upto: int | None = None  #: the largest size, in the units that `TABLE` names for the kernel; None: any


#: kernel -> rows, of which the first that fits is taken
TABLE: dict[str, tuple[TileRow, ...]] = {
    # size: 32-bit words of packed weights. A program unpacks `block` words, 8 weights each.
    "nf4": (TileRow(Tile(256, num_warps=2)),),
    "mxfp4": (TileRow(Tile(256, num_warps=2)),),
    # size: columns. A row a program, all of it in registers.
    "eight_bits_quantize": (
        TileRow(Tile(0, num_warps=4), upto=4096),
        TileRow(Tile(0, num_warps=8), upto=16384),
        TileRow(Tile(0, num_warps=16), upto=32768),
        TileRow(Tile(0, num_warps=32)),
    ),
    # size: rows. `block` of them a program.
    "fp8_adapter": (TileRow(Tile(64, num_warps=4)),),
    # size: weights. `rows` x `block` of them a program.
    "eight_bits_dense": (TileRow(Tile(64, rows=64, num_warps=4)),),
    "eight_bits_nf4": (TileRow(Tile(1024, rows=4, num_warps=4)),),
    "eight_bits_nf4_transposed": (TileRow(Tile(64, rows=128, num_warps=4)),),
    # size: columns of the product. `rows` x `block` of it a program, `step` of the inner dimension at a time. Two such
    # programs fit an SM: one multiplies while the other scales its sums (H200: 1,160 to 1,450 TFLOP/s; 256 columns of
    # eight warps: 940 to 1,220).
    "int8_product": (
        TileRow(Tile(128, rows=128, num_warps=4, num_stages=3, step=128), shared=LARGE),
        TileRow(Tile(128, rows=128, num_warps=8, num_stages=3, step=64)),
    ),
    # size: vocabulary. 32 warps make one program fill an SM, so that the rows in flight (132 x 256 KB) stay in L2 and
    # the second pass over a row does not go to memory again.
    "cross_entropy": (
        TileRow(Tile(16384, num_warps=32, num_stages=1), shared=LARGE, itemsize=2),
        TileRow(Tile(8192, num_warps=16, num_stages=2)),
    ),
    # size: hidden size. Wide rows: a program a row. Narrow ones (q and k norms): several rows a program.
    "rms_norm": (
        TileRow(Tile(0, rows=16, num_warps=4), upto=128),
        TileRow(Tile(0, rows=8, num_warps=4), upto=256),
        TileRow(Tile(0, rows=1, num_warps=4), upto=2048),
        TileRow(Tile(0, rows=1, num_warps=8), upto=8192),
        TileRow(Tile(0, rows=1, num_warps=16), upto=16384),
        TileRow(Tile(0, rows=1, num_warps=32)),
    ),
    # size: columns of gate. `block` columns of one row a program.
    "swiglu": (
        TileRow(Tile(1024, num_warps=4), itemsize=4),
        TileRow(Tile(1024, num_warps=4), upto=2048),
        TileRow(Tile(2048, num_warps=8)),
    ),
    # size: columns of the result. `block` elements of it a program, whatever their rows.
    "clamped_gate": (TileRow(Tile(1024, num_warps=4)),),
    # size: the padded rank. `block` columns of gate, `rows` rows a program, `step` of them at a time.
    "lora_mlp": (
        TileRow(Tile(64, rows=512, num_warps=4, step=32), upto=32),
        TileRow(Tile(64, rows=512, num_warps=4, step=16)),
    ),
    # size: columns of the product. `rows` x `block` of it a program, `step` of the inner dimension at a time. 8192 rows
    # of 8 choices of 128 experts, 2048 -> 1536, bf16: 497 TF/s on an H100, torch's product alone 533. Rows are the same
    # for all sizes, since products of the same rows share their tiles.
    "experts": (
        TileRow(Tile(128, rows=128, num_warps=8, num_stages=2, step=32), itemsize=4),
        TileRow(Tile(256, rows=128, num_warps=8, num_stages=4, step=64), shared=LARGE),
        TileRow(Tile(128, rows=128, num_warps=8, num_stages=3, step=64)),
    ),
    "experts_narrow": (
        TileRow(Tile(64, rows=128, num_warps=4, num_stages=3, step=32), itemsize=4),
        TileRow(Tile(64, rows=128, num_warps=4, num_stages=3, step=128), shared=LARGE),
        TileRow(Tile(64, rows=128, num_warps=4, num_stages=3, step=64)),
    ),
    # size: the padded rank. `block` columns a program, `step` rows at a time.
    "experts_outer": (
        TileRow(Tile(64, num_warps=4, num_stages=2, step=32), itemsize=4),
        TileRow(Tile(128, num_warps=4, num_stages=3, step=64), upto=64),
        TileRow(Tile(64, num_warps=4, num_stages=2, step=64)),
    ),
    # size: columns.
    "experts_collect": (TileRow(Tile(1024, num_warps=4)),),
    # size: columns. fp32 adapters times bf16 rows, on an H100 both kernels, us (in fp32, but for the copy of rows):
    # 8192x2048, rank 48: 35 and 30 (67, 61); 8192x5120, rank 48: 58 and 63 (130); 8192x4096, rank 16: 41 (92, 81).
    "adapters_project": (
        TileRow(Tile(0, rows=128, step=128, num_warps=8, num_stages=3), shared=LARGE),
        TileRow(Tile(0, rows=64, step=64, num_warps=4, num_stages=3)),
    ),
    "adapters_reduce": (TileRow(Tile(128, step=64, num_warps=8, num_stages=3)),),
    # size: columns of a head. `block` queries a program, `step` keys at a time, `rows` columns of them at a time.
    "attention": (
        TileRow(Tile(64, rows=64, num_warps=4, num_stages=1, step=64), itemsize=4),
        TileRow(Tile(128, rows=128, num_warps=8, num_stages=2, step=64), upto=128),
        TileRow(Tile(128, rows=128, num_warps=8, num_stages=1, step=64), shared=LARGE),
        TileRow(Tile(64, rows=64, num_warps=4, num_stages=1, step=64)),
    ),
    # the same, or `block` keys and `step` queries
    "attention_backward": (
        TileRow(Tile(64, rows=64, num_warps=8, num_stages=1, step=64), itemsize=4),
        TileRow(Tile(64, rows=128, num_warps=4, num_stages=1, step=64), upto=128),
        TileRow(Tile(64, rows=128, num_warps=8, num_stages=1, step=64), shared=LARGE),
        TileRow(Tile(64, rows=64, num_warps=8, num_stages=1, step=64)),
    ),
    # size: states of a channel. `block` channels a program, or at a time.
    "scan_ends": (TileRow(Tile(64, num_warps=1)),),
    "scan_starts": (TileRow(Tile(16, num_warps=1)),),
    "scan_outputs": (TileRow(Tile(64, num_warps=1)),),
    "scan_gradients": (TileRow(Tile(2, num_warps=4)),),
    # `block` columns a program, or at a time; `step` keys at a time. Narrower ones read out of bounds in Triton
    # 3.6, so heads of fewer columns are padded.
    "delta_prepare": (TileRow(Tile(64)),),
    "delta_scan": (TileRow(Tile(64)),),
    "delta_outputs": (TileRow(Tile(64, step=64)),),
    "delta_pending": (TileRow(Tile(64, step=64)),),
    "delta_products": (TileRow(Tile(64, step=64)),),
    "delta_operands": (TileRow(Tile(64, step=64)),),
    "channel_sums": (TileRow(Tile(64, step=64)),),
    "channel_prepare": (TileRow(Tile(64, num_warps=8, step=64)),),
    "channel_scan": (TileRow(Tile(64, step=64)),),
    "channel_scan_back": (TileRow(Tile(64, num_warps=8, step=64)),),
    "channel_outputs": (TileRow(Tile(64, step=64)),),
    "channel_products": (TileRow(Tile(64, step=64)),),
    "channel_operands": (TileRow(Tile(64, num_warps=8, step=32)),),
}


def find(kernel: str, shared: int, itemsize: int, size: int, warp: int = 32) -> Tile:
    """The first row of a kernel's table that fits.

    Args:
        kernel: a key of ``TABLE``.
        shared: bytes of shared memory that a program may take.
        itemsize: bytes an element.
        size: in the units that the table names for the kernel: elements, rows or columns.
        warp: threads of a warp; a program has at most 1024.

    Returns:
        Its tile.

    Raises:
        LookupError: none fits.
    """
    for row in TABLE[kernel]:
        if shared >= row.shared and row.itemsize in (None, itemsize) and (row.upto is None or size <= row.upto):
            return row.tile._replace(num_warps=min(row.tile.num_warps, THREADS // warp))
    raise LookupError(f"no tile for {kernel}: {shared} B of shared memory, {itemsize} bytes an element, size {size}")


def pick(kernel: str, tensor: torch.Tensor, size: int) -> Tile:
    """The tile for a tensor's device and dtype.

    Args:
        kernel: a key of ``TABLE``.
        tensor: the large one.
        size: in the units that the table names for the kernel: elements, rows or columns.

    Returns:
        The first that fits; shared memory counts as 0 where the tensor is on no GPU.
    """
    shared, warp = card.shared_memory(tensor.device), card.warp_size(tensor.device)
    return find(kernel, shared, tensor.element_size(), size, warp)
