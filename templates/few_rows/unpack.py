"""Words of eight 4-bit codes to bf16 levels, in registers."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import triton
import triton.language as tl

from .._nf4_kernel import code_value

__all__ = ["levels_of", "tables_of"]

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4_SIZES = (0.0, 0.0625 / 12, 8.0 / 12, 1.0, 4.0 / 12, 0.5, 2.0 / 12, 0.25)
_MXFP4_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LEVELS = {"nf4": _NF4} | {
    name: (*sizes, *(-size for size in sizes)) for name, sizes in (("fp4", _FP4_SIZES), ("mxfp4", _MXFP4_SIZES))
}


def _bf16(value: float) -> int:
    """The bits of the nearest bf16; ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def tables_of(quant_type: str) -> list[int]:
    """The bytes of the sixteen levels as eight int32: the low bytes of four levels each, then the high ones."""
    levels = [_bf16(value) for value in _LEVELS[quant_type]]
    words = [[levels[i + j] >> shift & 255 for j in range(4)] for shift in (0, 8) for i in (0, 4, 8, 12)]
    return [int.from_bytes(bytes(each), "little", signed=True) for each in words]


def _four_levels(shift: int, outputs: Sequence[int], high_first: bool) -> list[str]:
    """PTX that unpacks four nibbles of a word, $8, from bit `shift` on. high_first: where even elements are."""
    lines = [f"shr.u32 four, $8, {shift};" if shift else "mov.b32 four, $8;"]
    lines += ["and.b32 which, four, 0x7777;", "and.b32 upper, four, 0x8888;"]
    lines += ["shr.u32 upper, upper, 1;", "or.b32 upper, upper, 0x3210;"]  # bytes of the first or the second half
    for name, table in (("low", 9), ("high", 13)):
        lines += [
            f"prmt.b32 {name}, ${table}, ${table + 1}, which;",
            f"prmt.b32 other, ${table + 2}, ${table + 3}, which;",
        ]
        lines += [f"prmt.b32 {name}, {name}, other, upper;"]
    orders = (0x4051, 0x6273) if high_first else (0x5140, 0x7362)
    for order, (first, second) in zip(orders, (outputs[:2], outputs[2:]), strict=True):
        lines += [f"prmt.b32 both, low, high, {order:#x};", f"mov.b32 {{${first}, ${second}}}, both;"]
    return lines


_REGISTERS = ".reg .b32 four, which, upper, low, high, other, both;"


def _unpack(high_first: bool) -> str:
    """Eight bf16, $0 to $7, of a word, $8, by the tables in $9 to $16. In one line: Inductor quotes it in a source."""
    halves = (_four_levels(0, range(4), high_first), _four_levels(16, range(4, 8), high_first))
    return " ".join(["{", _REGISTERS, *halves[0], *halves[1], "}"])


HIGH_FIRST, LOW_FIRST = tl.constexpr(_unpack(True)), tl.constexpr(_unpack(False))
OPERANDS = tl.constexpr(",".join(["=h"] * 8 + ["r"] * 9))


@triton.jit
def levels_of(words, t0, t1, t2, t3, t4, t5, t6, t7, FORMAT: tl.constexpr, PERMUTE: tl.constexpr):
    """The levels of words of 8 nibbles, [ROWS, WORDS], as bf16 [ROWS, WORDS, 2, 2, 2]: element 4 j + 2 h + e of a word
    is at [e, h, j]. t0 to t7: of `tables_of`; they are arguments, since constants would be moved to registers anew.
    """
    if PERMUTE:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            LOW_FIRST if FORMAT == "mxfp4" else HIGH_FIRST,
            OPERANDS,
            [words, t0, t1, t2, t3, t4, t5, t6, t7],
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
        if FORMAT == "mxfp4":
            nibbles = (words[:, :, None] >> (4 * element)[None, None, :]) & 15
            half = (((nibbles & 7) << 9) | ((nibbles & 8) << 12)).to(tl.int16).to(tl.float16, bitcast=True)
            levels = half.to(tl.float32) * 16384.0  # E2M1 is a prefix of fp16, whose exponents have another bias
        else:
            shift = 8 * (element // 2) + 4 * (1 - element % 2)
            levels = code_value((words[:, :, None] >> shift[None, None, :]) & 15, FORMAT == "fp4")
        return tl.reshape(levels.to(tl.bfloat16), [words.shape[0], words.shape[1], 2, 2, 2])
