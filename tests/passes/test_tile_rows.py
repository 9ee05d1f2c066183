"""Where the plan says so, experts' rows run in tiles, one after another on both ways, and gradients stay what they are."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from tests.support.passes.run import assert_same, random, results
from tunecompile.compiler.backend import Backend
from tunecompile.compiler.pass_manager import Pass
from tunecompile.ops import collect_rows, grouped_lora_linear, inverse_order, spread_rows
from tunecompile.passes import PIPELINE
from tunecompile.passes.plan.tile_rows import _cut
from tunecompile.planner.candidates import backward_nodes, tiled_plans
from tunecompile.planner.expert_rows import GROUPED, GROUPED_BACKWARD, expert_rows, name_of_op
from tunecompile.planner.solver import Plan

EXPERTS, CHOICES, TOKENS, WIDTH, INNER, RANK, TILES = 4, 2, 24, 16, 8, 3, 3


def gate(h, ids):
    up, wide = h.chunk(2, -1)
    return F.silu(wide) * up


def masked(h, ids):
    return gate(h, ids) * (ids != 2).unsqueeze(-1) + (ids % 3).unsqueeze(-1) * 0.1


def block(act=gate):
    """Experts with adapters and biases on their first product."""

    def run(x, chosen, weights, up, down, bias, a, b):
        ids, order = torch.sort(chosen.reshape(-1))
        ends = torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        places = inverse_order(order)
        rows = spread_rows(x, order, places, CHOICES)
        hidden = grouped_lora_linear(rows, up, ends, [a], [b], [2.0], False, bias)[0]
        made = grouped_lora_linear(act(hidden, ids), down, ends, [], [], [], False, None)[0]
        made = made * spread_rows(weights.reshape(-1), order, places, 1).unsqueeze(-1)
        return collect_rows(made, order, places, CHOICES)

    return run


def operands(tokens=TOKENS, adapters=torch.float64):
    def draw(*shape, grad=False, dtype=torch.float64):
        return random(*shape, dtype=dtype, grad=grad, scale=0.3)

    return (
        draw(tokens, WIDTH, grad=True),
        torch.randint(EXPERTS, (tokens, CHOICES)),
        draw(tokens, CHOICES, grad=True),
        draw(EXPERTS, 2 * INNER, WIDTH),
        draw(EXPERTS, WIDTH, INNER),
        draw(EXPERTS, 2 * INNER),
        draw(EXPERTS * RANK, WIDTH, grad=True, dtype=adapters),
        draw(2 * INNER, RANK * EXPERTS, grad=True, dtype=adapters),
    )


def ran(fn, args, plan, tol=1e-12, executor="eager", **compiled):
    """(Op, tile) of the products in the graph behind the pass, and bytes saved, after a comparison with eager."""
    seen = []

    def look(graph, context):
        products = [node for node in graph.nodes if name_of_op(node) in (GROUPED, GROUPED_BACKWARD)]
        seen.append([(name_of_op(node), node.meta.get("tile")) for node in products])

    at = 1 + [p.name for p in PIPELINE].index("tile_rows")
    backend = Backend("test", [*PIPELINE[:at], Pass("look", "plan", look), *PIPELINE[at:]], executor, plan=plan)
    torch._dynamo.reset()
    assert_same(*(sum(results(f, args), []) for f in (torch.compile(fn, backend=backend, **compiled), fn)), tol=tol)
    assert not backend.failures
    return seen[-1], sum(int(n) for _, n in backend.contexts[-1].saved)


@pytest.mark.parametrize(
    "act, plan", [(gate, Plan(frozenset(), TILES)), (masked, Plan(None, TILES))], ids=["keep", "recompute"]
)
def test_both_ways_run_in_tiles(act, plan):
    args = operands()
    whole, saved = ran(block(act), args, Plan())
    tiled, less = ran(block(act), args, plan)
    assert len(tiled) == TILES * len(whole) == 4 * TILES and less < saved / 2
    for way in (GROUPED, GROUPED_BACKWARD):  # each tile ends before the next begins
        tiles = [tile for target, tile in tiled if target == way]
        assert tiles == sorted(tiles) and {*tiles} == {*range(TILES)}


@pytest.mark.parametrize("tokens", [5, 2])
def test_sizes_that_are_symbols(tokens):
    """Tiles have equal lengths but for the last; below two rows a tile there are none."""
    found, _ = ran(block(), operands(tokens), Plan(None, TILES), dynamic=tokens > 3)
    assert len(found) == (4 if tokens == 2 else 4 * TILES)


def test_where_experts_end_in_each_tile():
    """None of them before it begins: kernels read offsets as they are."""
    graph = Graph()
    rows, ends = (graph.placeholder(name) for name in ("rows", "ends"))
    with FakeTensorMode():
        rows.meta["val"], ends.meta["val"] = torch.empty(10, 1), torch.empty(3, dtype=torch.int32)
    pieces, cut = _cut(graph, [rows], [ends], 3)
    graph.output((pieces[rows], cut[ends]))
    made, found = GraphModule({}, graph)(torch.arange(10.0)[:, None], torch.tensor([2, 7, 10], dtype=torch.int32))
    assert [len(piece) for piece in made] == [3, 3, 4] and torch.cat(made).flatten().tolist() == [*range(10)]
    assert [each.tolist() for each in found] == [[2, 3, 3], [0, 3, 3], [0, 1, 4]]


@pytest.mark.slow
def test_generated_code():
    found, _ = ran(block(masked), operands(), Plan(None, 16), executor="inductor", dynamic=True)
    assert len(found) == 4 * 16


def test_gradients_that_are_rounded_are_not_sums_of_tiles():
    """Each part would be rounded. The way there has none."""
    found, _ = ran(block(), operands(adapters=torch.bfloat16), Plan(None, TILES), tol=0.02)
    assert [tile for target, tile in found if target == GROUPED_BACKWARD].count(None) == 1


def joint(fn, args):
    """The joint graph's calls on rows, there and back, and its tiled plans."""
    found = []

    def look(graph, context):
        found.append((*expert_rows(graph, backward_nodes(graph)), tiled_plans(graph, TILES)))

    torch._dynamo.reset()
    results(torch.compile(fn, backend=Backend("test", [Pass("look", "plan", look)], "eager")), args)
    return found[-1]


def test_what_works_row_by_row():
    """Both products, what is between them and the routing weight, and their ways back. No plan recomputes these whole."""
    there, back, plans = joint(block(), operands())
    assert len(there.products) == len(back.products) == 2 and not {*there.nodes} & {*back.nodes}
    assert plans == [Plan(frozenset(), TILES), Plan(None, TILES)]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.cumsum(0),
        lambda x: x.flip(0),
        lambda x: x.mean(0),
        lambda x: x.softmax(-2),
        lambda x: x.sum(),
        lambda x: x.t().contiguous().view(x.shape),
        lambda x: (x @ x.t()) @ x,
        lambda x: (x[:, :1] * torch.arange(x.shape[0], dtype=x.dtype)).sum(1, keepdim=True) * x,
    ],
    ids=["cumsum", "flip", "mean", "softmax", "sum", "transposed", "rows by rows", "as many columns as rows"],
)
def test_calls_that_are_not_by_row_see_all_rows(call):
    ran(block(lambda h, ids: gate(h, ids) + 1e-2 * call(gate(h, ids))), operands(), Plan(None, TILES))


def test_two_layers_of_experts_in_one_graph():
    first, second = block(), block(masked)
    found, _ = ran(lambda x, *o: second(x + first(x, *o), *o), operands(), Plan(None, TILES))
    assert len(found) == 8 * TILES
