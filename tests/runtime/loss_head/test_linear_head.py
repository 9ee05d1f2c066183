"""What Dynamo traces of a head: the product that it computes."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.support.heads import WIDTH, WORDS, linear, states
from tests.support.notes import has
from tunecompile.runtime.loss_head.linear_head import HeadTracer, NotLinear


class Squared(nn.Linear):
    def forward(self, x):
        return super().forward(x) ** 2


@pytest.mark.parametrize("bias", [False, True])
def test_the_product_of_a_linear(bias):
    """Its own weight, read at each call: another one is another head."""
    module, hidden = linear(bias=bias), states()
    tracer = HeadTracer(module, ())
    for _ in range(2):
        found = tracer.product(hidden)
        assert found.weight is module.weight and found.bias is module.bias
        assert found.weight.shape == (WORDS, WIDTH)
        module.weight = nn.Parameter(module.weight.detach() + 1)


def test_no_linear():
    tracer = HeadTracer(Squared(WIDTH, WORDS, dtype=torch.float64), ())
    for _ in range(2):
        with pytest.raises(NotLinear) as caught:
            tracer.product(states())
        assert caught.value.reason is not None and not has([caught.value.reason], "not-traced")


def test_what_was_compiled_keeps_no_tracer():
    """Dynamo's cache is out of reach of the garbage collector."""
    tracer = HeadTracer(linear(), ())
    tracer.product(states())
    gone = weakref.ref(tracer)
    del tracer
    gc.collect()
    assert gone() is None
