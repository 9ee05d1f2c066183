"""On a GPU adapted linears take packed weights, if these have one format and nothing else reads them."""

import importlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.support.ops.arguments import quantized
from tests.support.passes import run
from tests.support.passes.functions import linear_4bit, lora
from tests.support.passes.run import family, random
from tunecompile.ops import dequantize_4bit

check = partial(run.check, passes=family("nf4", "lora", "grouped_linear", "lora_nf4"))
APART = {"dequantize_4bit": 1, "lora_linear": 1}
PACKED = {"lora_linear": 1}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """The op's reference runs on the CPU."""
    module = importlib.import_module("tunecompile.passes.recognize.nf4")
    monkeypatch.setattr(module, "on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
    monkeypatch.setattr(module, "has_triton", lambda: True)


def adapters(n, k=64):
    return [random(2, k), random(n, 2)]


def adapted(layer, x, a, b):
    return layer(x) + F.linear(F.linear(x, a), b) * 0.5


@pytest.mark.parametrize("options", [{}, {"double": False}], ids=str)
def test_siblings_read_packed_weights(options):
    one, other = linear_4bit(n=6, **options), linear_4bit(n=128, **options)

    def fn(x, *o):
        return adapted(one, x, *o[:2]), adapted(other, x, *o[2:])

    check(fn, random(3, 64), *adapters(6), *adapters(128), expect=PACKED, whole=False)


@pytest.mark.parametrize("missing", ["on_gpu", "has_triton"])
def test_without_its_kernel_weights_are_dequantised(monkeypatch, missing):
    module = importlib.import_module("tunecompile.passes.recognize.nf4")
    monkeypatch.setattr(module, missing, lambda *_: False)
    layer = linear_4bit(n=6)
    seen = check(lambda x, *o: adapted(layer, x, *o), random(3, 64), *adapters(6), expect=APART, whole=False)
    assert not seen.refused


OTHERS = {
    "fp4": lambda: linear_4bit(6, 128, quant_type="fp4"),
    "no nested scales": lambda: linear_4bit(6, 128, double=False),
    "blocks of another size": lambda: linear_4bit(6, 128, blocksize=128),
}


@pytest.mark.parametrize("name", OTHERS)
def test_siblings_in_two_formats_are_dequantised(name):
    one, other = linear_4bit(6, 128), OTHERS[name]()

    def fn(x, *o):
        return adapted(one, x, *o[:2]), adapted(other, x, *o[2:])

    seen = check(fn, random(3, 128), *adapters(6, 128), *adapters(6, 128), whole=False)
    assert dict(seen.ops) == {"dequantize_4bit": 2, "lora_linear": 1} and "differ in format" in str(seen.refused)


def test_weights_beside_a_dense_one_are_dequantised():
    layer = linear_4bit(n=6)

    def fn(x, w, *o):
        return adapted(layer, x, *o[:2]), lora(x, w, *o[2:])

    seen = check(fn, random(3, 64), random(6, 64, grad=False), *adapters(6), *adapters(6), whole=False)
    assert dict(seen.ops) == APART and len(seen.refused) == 1


def test_packed_weights_that_are_written_in_between():
    """The op would read them behind the write."""
    (packed, *scales), _ = quantized(6, 64)

    def fn(x, a, b):
        weight = dequantize_4bit(packed, *scales)
        packed.bitwise_xor_(85)
        y = lora(x, weight, a, b)
        packed.bitwise_xor_(85)
        return y

    seen = check(fn, random(3, 64), *adapters(6), whole=False)
    assert dict(seen.ops) == {"dequantize_4bit": 1, "lora_linear": 1} and "in place" in str(seen.refused)
