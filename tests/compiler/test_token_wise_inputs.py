"""Which inputs of a graph have rows of tokens, and which calls of attention rows of documents."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tunecompile.compiler.attention_calls.found import AttentionArguments
from tunecompile.compiler.token_wise.graph import _inputs, _number_of_tokens, not_by_documents
from tunecompile.compiler.token_wise.operations import TOKENS


def given(*inputs):
    """(A graph with these inputs, all of whose sizes above 4 are symbols, equal ones the same; their symbols.)"""
    mode, graph, symbols = FakeTensorMode(shape_env=ShapeEnv()), Graph(), {}
    for at, made in enumerate(inputs):
        node = graph.placeholder(f"image_offsets_{at}" if made.dtype == torch.int32 else f"x{at}")
        kinds = [DimDynamic.DYNAMIC if size > 4 else DimDynamic.STATIC for size in made.shape]
        context = StatelessSymbolicContext(dynamic_sizes=kinds)
        node.meta["example_value"] = fake = mode.from_tensor(made, symbolic_context=context)
        symbols |= dict(zip(made.shape, fake.shape))
    graph.output(())
    return GraphModule({}, graph), symbols


@pytest.mark.parametrize(
    "inputs, tokens",
    [
        ([torch.empty(1, 9, 3)], 9),
        ([torch.empty(1, 7), torch.empty(2, 8, 3), torch.empty(1, 9, 3)], 9),
        ([torch.empty(1, 9, 3), torch.empty(1, 8, 3)], 9),
        ([torch.zeros(6).int(), torch.empty(7, 0), torch.empty(5, 2).long(), torch.empty(4, 3), torch.empty(9, 3)], 9),
        ([torch.zeros(6).int(), torch.empty(9, 3), torch.empty(8, 3)], 9),
    ],
)
def test_whose_rows_are_tokens(inputs, tokens):
    """A row [1, N, ...]; of a tower numbers [N, H], and neither ids nor an empty tensor that tells a length."""
    gm, symbols = given(*inputs)
    assert str(_number_of_tokens(gm)) == str(symbols[tokens])


def test_sizes_that_are_no_tokens_stay():
    """What depends on tokens has as many more of them; another size is the one that it was."""
    gm, symbols = given(torch.empty(1, 9, 3), torch.empty(7), torch.empty(2, 9))
    with gm.graph.inserting_after(list(gm.graph.nodes)[2]):
        twice = gm.graph.placeholder("twice")
    twice.meta["example_value"] = next(iter(gm.graph.nodes)).meta["example_value"].new_empty(2 * symbols[9], 3)
    shapes = [tuple(made.shape) for made in _inputs(gm, symbols[9])]
    assert shapes == [(1, TOKENS, 3), (7,), (2, TOKENS), (2 * TOKENS, 3)]


@pytest.mark.parametrize(
    "shapes, alone",
    [
        ([(1, 2, 6, 4)] * 3, True),
        ([(1, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4)], False),
        ([(1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 3, 6, 4)], False),
        ([(1, 2, 6, 4), (2, 2, 6, 4), (2, 2, 6, 4)], False),
    ],
)
def test_documents_are_rows_of_four_dimensions(shapes, alone):
    """Of one row. Catches a call whose heads would be read as tokens."""
    q, k, v = map(torch.zeros, shapes)
    call = AttentionArguments(q, k, v)
    assert (not_by_documents(call) is None) is alone
