"""Every template compiled for the cards users own, and traced for Inductor, without a GPU."""

import functools

import pytest

from tests.support.offline import finish, start
from tunecompile.templates import _tiles

pytest.importorskip("triton")

# Shared memory a block may use, in bytes (CUDA programming guide, technical specifications by compute capability; LDS in
# AMD's instruction set architectures of CDNA 3 and RDNA 3).
SHARED_LIMIT = {
    "75": 65536,
    "80": 166912,
    "86": 101376,
    "89": 101376,
    "90": 232448,
    "100": 232448,
    "120": 101376,
    "gfx942": 65536,
    "gfx1100": 65536,
}
SPILLED = 384  #: bytes a thread at most, of some kernels that fill NVIDIA's 255 registers
SPILLED_ON_AMD = 16  #: attention, with Triton before 3.8


@functools.cache
def offline() -> tuple[list[dict], list[dict]]:
    """Of one process, which takes seconds to start: what was traced, and what was compiled for one card."""
    lines = finish(start("trace", "compile", "90"))
    return [line for line in lines if "targets" in line], [line for line in lines if "registers" in line]


@pytest.mark.parametrize("card", [pytest.param(c, marks=[] if c == "90" else pytest.mark.slow) for c in SHARED_LIMIT])
def test_compiles_within_the_card(card):
    lines = offline()[1] if card == "90" else finish(start("compile", card))
    kernels = {line["name"]: line for line in lines}
    assert len(kernels) >= 12
    for name, line in kernels.items():
        assert line["shared"] <= SHARED_LIMIT[card] and 0 < line["registers"] <= 512, line
        assert line["spilled"] <= (SPILLED_ON_AMD if card.startswith("gfx") else 0 if card == "75" else SPILLED), line
        if name != "experts_tiles" and not card.startswith("gfx"):  # four numbers a program
            few = ("scan_outputs", "scan_gradients", "one_query_combine", "few_rows_downs")  # little, or single columns
            writes = line["wide_stores"] or name == "fp8_adapter" or name in few
            reads = line["wide_loads"] or name.startswith("experts_zero") or name in few  # offsets alone
            assert writes and reads, f"{name}: no 16-byte accesses on {card}"


def test_programs_have_at_most_1024_threads():
    """Warps of AMD's data centre cards have 64."""
    for kernel, rows in _tiles.TABLE.items():
        for row in rows:
            for warp in (32, 64):
                tile = _tiles.find(kernel, 65536, row.itemsize or 2, row.upto or 1 << 30, warp)
                assert tile.num_warps * warp <= 1024, kernel


def test_traced_launches_become_nodes_that_write_what_they_should():
    written = {
        "nf4": ["out"],
        "mxfp4": ["out"],
        "cross_entropy": ["logits", "losses"],
        "cross_entropy_statistics": ["entropies", "logits", "losses", "means", "squares", "tops"],
        "rms_norm_wide": ["dx"],
        "rms_norm_backward": ["dweight", "dx"],
        "rms_norm_heads": ["dx"],
        **{f"attention{kind}": ["logsumexp", "out"] for kind in ("", "_wide", "_branches", "_dropped")},
        **{f"attention{kind}_keys": ["dk", "dv"] for kind in ("", "_branches", "_dropped")},
        **{f"attention{kind}_queries": ["dq"] for kind in ("", "_branches", "_dropped")},
        "causal_softmax": ["logsumexp", "sums", "weights"],
        "causal_softmax_backward": ["dscores", "weights"],
        **dict.fromkeys(
            ["layer_norm_backward", "modulated_norm_backward", "modulated_rms_norm_backward"],
            ["dbias", "dweight", "dx"],
        ),
        "fp8_quantize": ["out", "scales"],
        "fp8_quantize_wide": ["out", "scales"],
        "fp8_adapter": ["out", "scales"],
        "fp8_dense": ["out"],
        "fp8_dense_transposed": ["out"],
        "fp8_nf4": ["out"],
        "fp8_nf4_transposed": ["out"],
        "int8_quantize": ["out", "scales"],
        **dict.fromkeys(["int8_nf4", "int8_nf4_transposed", "int8_product", "int8_product_plain"], ["out"]),
        "swiglu": ["out"],
        "swiglu_backward": ["both"],
        "lora_rows": ["out"],
        "lora_columns": ["out"],
        "lora_mlp": ["both", "parts"],
        "lora_beside": ["out"],
        "lora_mlp_piece": ["both", "parts"],
        "few_rows_begin": ["parts", "xa"],
        "few_rows_dense": ["parts"],
        **dict.fromkeys(["few_rows_experts", "few_rows_experts_mxfp4", "few_rows_experts_dense"], ["out"]),
        "few_rows_downs": ["out"],
        **dict.fromkeys(["one_query_split", "one_query_split_added"], ["sums", "tops"]),
        "one_query_combine": ["out"],
        "few_rows_finish": ["out", "projected"],
        **dict.fromkeys(["experts_tiles", "experts_rows", "experts_input", "experts_narrow"], ["out"]),
        **dict.fromkeys(["adapters_project", "adapters_reduce"], ["out"]),
        **dict.fromkeys(["experts_zero_idle", "experts_zero_behind"], ["out"]),
        **dict.fromkeys(["experts_outer", "experts_collect", "delta_outputs", "delta_pending"], ["out"]),
        "scan_ends": ["out", "total"],
        **dict.fromkeys(["scan_ends_reverse", "scan_outputs"], ["out"]),
        "scan_starts": ["states"],
        "scan_gradients": ["da", "db", "dc", "ddt", "dx"],
        "channel_sums": ["total"],
        "channel_prepare": ["inverse", "k_out", "pairs", "q_in", "scores", "through", "u", "w"],
        "channel_scan": ["final", "states", "written"],
        "channel_scan_back": ["states", "written"],
        "channel_outputs": ["out"],
        "channel_products": ["by_score", "by_system", "dbeta", "dv", "missing"],
        "channel_operands": ["dbeta", "dg", "dk", "dq"],
        "delta_prepare": ["inverse", "total", "u", "w"],
        "delta_scan": ["final", "states", "written"],
        "delta_scan_back": ["states", "written"],
        "delta_products": ["by_score", "by_system", "dbeta", "dtotal", "dv", "missing"],
        "delta_operands": ["dbeta", "dg", "dk", "dq"],
    }
    lines, _ = offline()
    assert len(lines) >= 12
    for line in lines:
        name = line["name"]
        assert line["targets"] == ["triton_kernel_wrapper_functional"], line
        if name.startswith("example"):  # all that it writes to is an argument
            assert line["written"] != [[]] and {*line["copies"]} == {"aten.copy_.default"}, line
            continue
        expected = written.get(name) or written["nf4" if name.startswith("nf4") else "cross_entropy"]
        assert line["written"] == [expected], line
        # No clone, copy or scatter around the launch, but for an argument that is overwritten.
        overwrites = name.startswith(
            (
                "cross_entropy",
                "lora_rows",
                "lora_columns",
                "lora_beside",
                "lora_mlp_piece",
                "fp8_dense",
                "fp8_nf4",
                "int8_nf4",
                "delta_operands",
                "experts_zero",
                "scan_starts",
                "channel_operands",
            )
        )
        assert line["copies"] == (["aten.copy_.default"] if overwrites else []), line
