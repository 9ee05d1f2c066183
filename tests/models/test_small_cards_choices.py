"""What each op and each kernel runs with on cards of 15 to 32 GB: chosen from tables, so that nothing is compiled here."""

import pytest
import torch

from tests.support.ops.arguments import dense_mlp, lora_arguments
from tunecompile._torch import card
from tunecompile.ir.example import Draw, arguments_of
from tunecompile.ir.op import HALF, OPS
from tunecompile.ir.pretend_gpu import as_on_gpu
from tunecompile.ops import lora_linear, lora_mlp
from tunecompile.ops.eight_bits import FP8, ROW_SCALES_ON_ADA
from tunecompile.passes.plan import probe

pytest.importorskip("triton")
from tunecompile.templates import _tiles  # noqa: E402

LARGER = ("rtx3090", "rtx4090", "rtx5090")
SMALL = ("t4", *LARGER)
BY_TEMPLATE = {
    op.name: op
    for op in OPS.values()
    if any(provider.name in probe.BY_TEMPLATE for provider in op.providers) and (op.owner or op).example
}
#: families whose templates multiply by tensor cores as they are since Ampere
FROM_AMPERE = (
    "varlen_attention",
    "branch_attention",
    "dropout_attention",
    "lora_mlp",
    "lora_mlp_tiled",
    "grouped_lora_linear",
    "gathered_lora_linear",
)
#: those whose states need the range of bfloat16
IN_BFLOAT16 = ("gated_delta_rule", "channel_delta_rule", "ssd_scan")
KERNELS = tuple(name for name in _tiles.TABLE if name not in ("fp8_adapter", "int8_product"))
PIPELINED = ("experts", "experts_narrow")  #: load tiles of both operands ahead


def chosen(name, dtype, on):
    op = BY_TEMPLATE[name]
    arguments = arguments_of(op, Draw(torch.device("cpu"), dtype))
    with as_on_gpu(on):
        return op.choose(arguments, None).name


def family(name):
    return name.removesuffix("_backward")


@pytest.mark.parametrize("on", LARGER)
@pytest.mark.parametrize("name", BY_TEMPLATE)
def test_cards_since_ampere_take_every_template(name, on):
    templates = (*probe.BY_TEMPLATE, "few_rows")  # an example has few rows
    assert chosen(name, torch.bfloat16, on) in templates
    half = chosen(name, torch.float16, on)
    assert (half in templates) == (family(name) not in IN_BFLOAT16), half


@pytest.mark.parametrize("name", BY_TEMPLATE)
def test_a_t4_has_no_bfloat16_and_no_products_of_ampere(name):
    """Codes in 4 bits and scans show no tensor in bfloat16: the dtype that they are to give has to be looked at."""
    own = ("reference", "bitsandbytes")  # as eager has it, where it is imported
    assert chosen(name, torch.bfloat16, "t4") in own
    old = family(name) in (*FROM_AMPERE, *IN_BFLOAT16)
    assert chosen(name, torch.float16, "t4") in (("reference",) if old else probe.BY_TEMPLATE)


@pytest.mark.parametrize("on", [*SMALL, "h100"])
def test_fp8_by_row(on):
    """Scales by row are for Hopper and the data centre's Blackwell, and for Ada where torch's product is right."""
    arguments = dense_mlp(torch.bfloat16)
    arguments[0] = arguments[0].repeat(100, 1, 1)  # of few rows no weight is rounded
    with as_on_gpu(on):
        refused = FP8.refuse(arguments[0], [128, 64])
        found = lora_mlp.choose(arguments, "fp8").name
    right = on == "h100" or (on == "rtx4090" and not ROW_SCALES_ON_ADA.present)
    assert (refused is None) == right and ("fp8" in found) == right, (refused, found)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("on", [*SMALL, "a100-40", "h100"])
def test_8_bits_are_what_the_card_has(on, dtype):
    """FP8 where a card multiplies in it, else integers, which a T4 has in fp16."""
    arguments = lora_arguments(torch.randn(400, 64).to(dtype), (48, 16), (4, 8), base=dtype)
    with as_on_gpu(on):
        found = {asked: lora_linear.choose(arguments, asked).name for asked in ("fp8", "int8", "8bit")}
    runs = dtype == torch.float16 or on != "t4"
    assert (found["int8"] == "int8") == runs, found
    assert found["8bit"] == ("fp8" if found["fp8"] == "fp8" else "int8" if runs else found["int8"])


def row_of(kernel, like, size):
    tile = _tiles.pick(kernel, like, size)
    (row, *_) = [row for row in _tiles.TABLE[kernel] if row.tile == tile]
    return row


@pytest.mark.parametrize("on", SMALL)
@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_fit_the_card(kernel, on):
    """Of every dtype and size; rows for a data centre's card are further up in the tables."""
    limit = card.SHARED.get(card.CARDS[on].capability, card.LDS)
    for dtype in (*HALF, torch.float32):
        like = torch.empty(1, dtype=dtype)
        for size in (1, 16, 64, 128, 256, 512, 4096, 1 << 14, 1 << 18):
            with as_on_gpu(on):
                row = row_of(kernel, like, size)
            assert row.shared <= limit and 32 * row.tile.num_warps <= _tiles.THREADS
            if kernel in PIPELINED:
                ahead = (row.tile.num_stages - 1) * row.tile.step * (row.tile.rows + row.tile.block)
                assert ahead * like.element_size() <= limit


@pytest.mark.parametrize("kernel", [name for name in KERNELS if any(row.shared for row in _tiles.TABLE[name])])
def test_a_data_centres_card_takes_larger_tiles(kernel):
    """So the card is looked up: a choice that saw none would be the small one everywhere."""
    like, size = torch.empty(1, dtype=torch.bfloat16), 512
    found = {}
    for on in (*SMALL, "h100"):
        with as_on_gpu(on):
            found[on] = row_of(kernel, like, size)
    assert found["h100"].shared == _tiles.LARGE and len({found[on] for on in SMALL}) == 1 and not found["t4"].shared
