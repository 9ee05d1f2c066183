"""When adapters are written into the matrix of their weights: products of two small weights, without a model."""

import types

import pytest
import torch
from torch import Tensor, nn

from tunecompile.compiler.weight_layout import FusedWeightSlots
from tunecompile.ops.nf4 import dequantize_4bit
from tunecompile.runtime.memory import weight_cache
from tunecompile.runtime.memory.weight_cache import WeightCache

RANK, ROWS, COLUMNS, BLOCK = 2, 4, 8, 8


class Product:
    """Two 4-bit weights that are read together, with adapters: `[[W, scale B], [A, 0]]`.

    Its inputs are those of a compiled graph: what the weights are made of, then A and B of each.
    """

    scales = (2.0, 0.5)

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)
        made = [self._weight() for _ in range(2)]
        self.inputs, weights = [], []
        for parts in made:
            start = len(self.inputs)
            tensors = [part for part in parts if isinstance(part, Tensor)]
            places = iter(range(start, start + len(tensors)))
            self.inputs += tensors
            weights.append(tuple(next(places) if isinstance(part, Tensor) else (part,) for part in parts))
        begin = len(self.inputs)
        shape = (2 * ROWS + 2 * RANK, COLUMNS + 2 * RANK)
        self.position = FusedWeightSlots(
            *(0, tuple(weights), (begin, begin + 1), (begin + 2, begin + 3)),
            *(self.scales, shape, COLUMNS, torch.float32),
        )
        self.inputs += self.adapters()

    def _weight(self) -> list:
        packed = torch.randint(0, 256, (ROWS * COLUMNS // 2, 1), dtype=torch.uint8, generator=self.generator)
        absmax = torch.rand(ROWS * COLUMNS // BLOCK, generator=self.generator) + 0.5
        return [packed, absmax, None, None, None, ROWS, COLUMNS, BLOCK, "nf4", torch.float32]

    def adapters(self) -> list[Tensor]:
        shapes = [(RANK, COLUMNS)] * 2 + [(ROWS, RANK)] * 2
        return [nn.Parameter(torch.randn(shape, generator=self.generator)) for shape in shapes]

    def step(self) -> None:
        """As an optimizer does that autograd's counters do not see."""
        for adapter in self.inputs[-4:]:
            adapter.data.add_(1.0)

    def expected(self) -> Tensor:
        matrix = torch.zeros(self.position.shape)
        for i, weight in enumerate(self.position.weights):
            parts = [self.inputs[part] if isinstance(part, int) else part[0] for part in weight]
            rows, a, b = slice(i * ROWS, (i + 1) * ROWS), self.inputs[i - 4], self.inputs[i - 2]
            matrix[rows, :COLUMNS] = dequantize_4bit.choose(parts).run(*parts)
            ranks = slice(i * RANK, (i + 1) * RANK)
            matrix[2 * ROWS :][ranks, :COLUMNS] = a
            matrix[rows, COLUMNS:][:, ranks] = self.scales[i] * b
        return matrix

    def forward(self, cache: WeightCache) -> Tensor:
        """The matrix that a compiled forward gets."""
        given = cache.forward(lambda inputs: inputs, [self.position])(list(self.inputs))
        assert all(x is y for x, y in zip(given[1:], self.inputs[1:]))
        return given[0]

    def right(self, cache: WeightCache) -> bool:
        return torch.equal(self.forward(cache), self.expected())


@pytest.fixture
def product():
    return Product()


def test_a_matrix_holds_weights_and_adapters(product):
    """It is made once; and what an optimizer wrote to adapters is in it from the next step on."""
    cache = WeightCache()
    cache.begin(0)
    assert product.right(cache)
    first = product.forward(cache)
    assert cache.bytes == first.nbytes
    for _ in range(2):
        product.step()
        assert not product.right(cache), "the step has not begun"
        cache.begin(0)
        assert product.right(cache) and product.forward(cache).data_ptr() == first.data_ptr()


def test_other_adapters_of_the_same_weights(product):
    """They are written where they are met, and at each beginning of a step from then on."""
    cache = WeightCache()
    assert product.right(cache)
    cache.begin(0)
    own = product.inputs[-4:]
    product.inputs[-4:] = product.adapters()
    assert product.right(cache) and not cache.writers
    cache.begin(0)
    assert product.right(cache), "those that are gone are not written over them"
    product.step()
    cache.begin(0)
    assert product.right(cache)
    product.inputs[-4:] = own
    assert product.right(cache)


def test_adapters_that_are_met_write_once(product):
    """The writer stays, as long as each call has those that it knows: it is made by a launch on a GPU."""
    cache = WeightCache()
    assert product.right(cache)
    cache.begin(0)
    writer = cache.writers[0]
    for _ in range(2):
        assert product.right(cache)
        cache.begin(0)
        assert cache.writers[0] is writer


def test_weights_that_layers_of_two_stacks_read(product):
    """Either's first layer has adapters written: nobody knows which of them runs first in the next step."""
    cache = WeightCache()
    assert product.right(cache)
    cache.begin(0)
    cache.enter(0, stack=1)
    matrix = product.forward(cache)._matrix
    assert matrix.stack is None and not cache.writers
    for stack in (0, 1):
        product.step()
        cache.begin(stack)
        assert product.right(cache)
    assert matrix.stack is None and set(cache.writers) == {0, 1}


def test_weights_of_one_stack_are_written_before_it_alone(product):
    cache = WeightCache()
    assert product.right(cache) and product.forward(cache)._matrix.stack == 0
    product.step()
    cache.begin(1)
    assert not product.right(cache)
    cache.begin(0)
    assert product.right(cache)


def test_weights_that_are_written_to_are_read_again(product):
    cache = WeightCache()
    assert product.right(cache)
    with torch.no_grad():
        product.inputs[0].copy_(product.inputs[0].flip(0))
    assert product.right(cache)
    product.inputs[0].data = product.inputs[0].data.clone()  # as .to(device) does
    assert product.right(cache)
    cache.begin(0)
    assert product.right(cache) and len(cache.matrices) == 1


def test_what_is_given_back_is_made_again(product):
    cache = WeightCache()
    assert product.right(cache)
    cache.begin(0)
    cache.release()
    assert not cache.bytes and not cache.writers and product.right(cache)


def test_adapters_without_memory_are_not_written(product):
    """As an engine leaves those that it gathers for a layer's call."""
    cache = WeightCache()
    assert product.right(cache)
    cache.begin(0)
    product.inputs[-1].untyped_storage().resize_(0)
    cache.begin(0)
    assert not cache.matrices and not cache.writers[0].addresses


def test_a_stack_that_is_called_no_more_leaves_nothing_behind(product):
    """Its weights have moved: their matrix is dropped before another stack that begins a step, and in no stack behind
    that, where each look at all of them would stand before a layer."""
    cache = WeightCache()
    assert product.right(cache)
    cache.begin(0)
    assert list(cache.writers) == [0]
    for part in product.inputs[:2]:
        part.data = part.data.clone()  # as .to(device) does
    cache.last[1] = 0  # the step has begun with another stack
    cache.begin(2)
    assert len(cache.matrices) == 1
    cache.expect()
    cache.begin(1)
    assert not cache.matrices and list(cache.writers) == [1], "a writer holds the matrix's memory"


def test_a_backward_reads_the_adapters_of_its_forward(product):
    """Another adapter ran between, and the next step writes the one that was written last."""
    cache = WeightCache()
    given, own = [product.forward(cache), *product.inputs[1:]], list(product.inputs)
    product.inputs[-4:] = product.adapters()
    assert product.right(cache)
    cache.begin(0)
    product.inputs = own
    run = cache.backward(lambda inputs: inputs[0].clone(), [product.position])
    assert torch.equal(run(given), product.expected()) and not cache.writers
    cache.begin(0)
    assert torch.equal(run(given), product.expected()) and cache.writers
    del cache
    product.inputs[-4:] = given[-4:] = product.adapters()
    assert torch.equal(run(given), product.expected()), "the model was restored"


def test_a_step_begins_with_whichever_layer_comes_first(monkeypatch):
    """Adapters are written at its beginning: with those of the step before, a layer that is called alone was wrong."""
    cache, begun = WeightCache(), []
    monkeypatch.setattr(cache, "begin", begun.append)
    for place in (2, 3):
        cache.enter(place)
    assert begun == [0]
    cache.enter(5)
    cache.expect()
    cache.enter(7)
    assert begun == [0, 0]
    cache.enter(1, 4)
    cache.enter(6)
    assert begun == [0, 0, 4, 0] and cache.last == {0: 6, 4: 1} and cache.stack == 0


def test_a_gpu_dequantises_into_the_matrix(monkeypatch):
    """By a template, into its own rows and the first columns."""
    nf4 = pytest.importorskip("tunecompile.templates.nf4")
    written = []
    monkeypatch.setattr(nf4, "dequantize_siblings", lambda *given, **named: written.append((given, named)))
    monkeypatch.setattr(weight_cache, "has_triton", lambda: True)
    packed, out = torch.zeros(4, 1, dtype=torch.uint8), types.SimpleNamespace(is_cuda=True)
    weight = [packed, "absmax", "code", "scale", "offset", 3, 8, 64, "fp4", torch.half]
    assert weight_cache._write_weight(out, 5, 7, weight) == 3
    (((made,), columns, target), named) = written[0]
    assert (columns, target) == (7, out) and named == {"blocksize": 64, "quant_type": "fp4", "row": 5}
    assert torch.equal(made[0], packed) and tuple(made[1:]) == ("absmax", "code", "scale", "offset", 3)


@pytest.mark.parametrize(
    "stride, dtype, by_template", [(1, torch.half, True), (2, torch.half, False), (1, None, False)]
)
def test_a_gpu_writes_all_adapters_in_one_launch(stride, dtype, by_template, monkeypatch):
    """Where they lie row by row, in types that the template reads; else one after the other."""
    lora = pytest.importorskip("tunecompile.templates.lora")
    monkeypatch.setattr(lora, "write_pieces", lambda pieces: pieces)
    monkeypatch.setattr(weight_cache, "has_triton", lambda: True)

    def piece(stride, dtype):
        return types.SimpleNamespace(is_cuda=True, dtype=dtype, stride=(9, stride).__getitem__)

    plain, other = piece(1, torch.half), piece(stride, dtype)
    pieces = [(plain, plain, 1.0), (other, plain, 2.0)]
    assert (weight_cache.writer(pieces) is pieces) is by_template
    assert callable(weight_cache.writer([])) and weight_cache.writer([])() is None
