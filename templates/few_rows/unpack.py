"""Words of eight 4-bit codes to bf16 levels, in registers."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import triton
import triton.language as tl

from .._nf4_kernel import code_value

__all__ = ["levels_of"]

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4_SIZES = (0.0, 0.0625 / 12, 8.0 / 12, 1.0, 4.0 / 12, 0.5, 2.0 / 12, 0.25)
_FP4 = (*_FP4_SIZES, *(-size for size in _FP4_SIZES))


def _bf16(value: float) -> int:
    """The bits of the nearest bf16; ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _four_levels(levels: Sequence[int], shift: int, outputs: Sequence[int]) -> str:
    """PTX that unpacks four nibbles of a word, from bit `shift` on, to four bf16. Even elements are in high nibbles."""
    lines = [f"shr.u32 four, $8, {shift};" if shift else "mov.b32 four, $8;"]
    lines += ["and.b32 which, four, 0x7777;", "and.b32 upper, four, 0x8888;"]
    lines += ["shr.u32 upper, upper, 1;", "or.b32 upper, upper, 0x3210;"]  # bytes of the first or the second half
    for name, of in (("low", 0), ("high", 8)):
        tables = [sum((levels[i + j] >> of & 255) << 8 * j for j in range(4)) for i in (0, 4, 8, 12)]
        lines += [f"prmt.b32 {name}, {tables[0]:#x}, {tables[1]:#x}, which;"]
        lines += [f"prmt.b32 other, {tables[2]:#x}, {tables[3]:#x}, which;", f"prmt.b32 {name}, {name}, other, upper;"]
    for order, pair in ((0x4051, outputs[:2]), (0x6273, outputs[2:])):
        lines += [f"prmt.b32 both, low, high, {order:#x};", f"mov.b32 {{${pair[0]}, ${pair[1]}}}, both;"]
    return "\n".join(lines)


def _unpack(table: Sequence[float]) -> str:
    """PTX that unpacks a word, $8, to eight bf16, $0 to $7."""
    levels = [_bf16(value) for value in table]
    registers = ".reg .b32 four, which, upper, low, high, other, both;"
    return "{" + "\n".join([registers, _four_levels(levels, 0, range(4)), _four_levels(levels, 16, range(4, 8))]) + "}"


UNPACK_NF4 = tl.constexpr(_unpack(_NF4))
UNPACK_FP4 = tl.constexpr(_unpack(_FP4))
EIGHT_OF_ONE = tl.constexpr(",".join(["=h"] * 8 + ["r"]))


@triton.jit
def levels_of(words, FP4: tl.constexpr, PERMUTE: tl.constexpr):
    """The levels of words of 8 nibbles, [ROWS, WORDS], as bf16 [ROWS, WORDS, 2, 2, 2]: element 4 j + 2 h + e of a word
    is at [e, h, j].
    """
    if PERMUTE:
        asm: tl.constexpr = UNPACK_FP4 if FP4 else UNPACK_NF4
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            asm,
            EIGHT_OF_ONE,
            [words],
            dtype=(
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),
            is_pure=True,
            pack=1,
        )
        return tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
    else:
        place = tl.arange(0, 8)  # 4 e + 2 h + j
        element = place % 2 * 4 + place // 2 % 2 * 2 + place // 4
        shift = 8 * (element // 2) + 4 * (1 - element % 2)
        nibbles = (words[:, :, None] >> shift[None, None, :]) & 15
        return tl.reshape(code_value(nibbles, FP4).to(tl.bfloat16), [words.shape[0], words.shape[1], 2, 2, 2])
