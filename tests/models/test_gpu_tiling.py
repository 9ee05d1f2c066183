"""On a real GPU: an MLP in pieces is as exact as a whole one, and takes the room of a piece."""

import copy
import gc

import pytest
import torch
from torch.utils._pytree import tree_map

import tunecompile
from tests.support import zoo
from tests.support.notes import EAGER, FAILED, find
from tests.support.ops.arguments import dense_mlp, mlp_leaves, packed_mlp
from tests.support.ops.checks import error, wide
from tunecompile.compiler.backend import Backend
from tunecompile.ops import lora_mlp
from tunecompile.passes import PIPELINE
from tunecompile.planner.solver import RECOMPUTE, Plan

pytestmark = pytest.mark.gpu
GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_caches():
    """What comes from one says nothing of providers."""
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def on_gpu(arguments):
    made = tree_map(lambda v: v.detach().cuda() if isinstance(v, torch.Tensor) else v, arguments)
    made[0] = torch.randn(2, 333, 64, device="cuda", dtype=torch.bfloat16)
    return made


def upstream(y):
    generator = torch.Generator("cuda").manual_seed(3)
    return torch.randn(y.shape, generator=generator, device="cuda").bfloat16().to(y.dtype)


def exactly(arguments):
    """y and the gradients, in fp64."""
    made = [
        tree_map(lambda v: v.detach().requires_grad_() if isinstance(v, torch.Tensor) else v, part)
        if i in (0, 2, 3)
        else part
        for i, part in enumerate(wide(arguments))
    ]
    y = lora_mlp.reference(*made)[0]
    return [y.detach(), *torch.autograd.grad(y, mlp_leaves(made), upstream(y))]


def whole(arguments):
    forward, backward = (
        next(p for p in o.providers if p.name == "joined").run for o in (lora_mlp, lora_mlp.backward_op)
    )
    y, *saved = forward(*arguments, used=[True] * 4)
    return [y, *backward(upstream(y), *arguments, *saved)]


def in_pieces(arguments, tiles):
    forward, backward = (
        next(p for p in o.providers if p.name == "joined").run for o in (lora_mlp.tiled, lora_mlp.tiled.backward_op)
    )
    y = forward(*arguments, tiles)
    return [y, *backward(upstream(y), *arguments, tiles)]


@pytest.mark.parametrize("tiles", [1, 4, 16])
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_as_exact_as_the_whole(kind, tiles):
    arguments = on_gpu(dense_mlp(torch.bfloat16) if kind == "dense" else packed_mlp(True)[0])
    for best, theirs, mine in zip(exactly(arguments), whole(arguments), in_pieces(arguments, tiles), strict=True):
        assert (theirs.shape, theirs.dtype) == (mine.shape, mine.dtype)
        assert error(mine, best) <= 2 * max(error(theirs, best), torch.finfo(torch.bfloat16).eps / 2)


class Adapted(torch.nn.Module):
    """A frozen linear with LoRA, in bf16."""

    def __init__(self, columns, rows):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / columns**0.5, requires_grad=False
        )
        self.a = torch.nn.Parameter(torch.randn(16, columns, device="cuda", dtype=torch.bfloat16) / columns**0.5)
        self.b = torch.nn.Parameter(torch.randn(rows, 16, device="cuda", dtype=torch.bfloat16) / 4)

    def forward(self, x):
        f = torch.nn.functional
        return f.linear(x, self.weight) + f.linear(f.linear(x, self.a), self.b) * 0.5


class MLP(torch.nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.gate, self.up, self.down = Adapted(hidden, inner), Adapted(hidden, inner), Adapted(inner, hidden)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def measured(layer, x, plan):
    """(bytes at the peak of one step beside what is there, gradients), by generated code under this plan."""
    torch._dynamo.reset()
    backend = Backend("mlp" + plan.key.replace(" ", "_"), PIPELINE, plan=plan)
    run = torch.compile(layer, backend=backend, dynamic=False)
    for _ in range(2):  # the first compiles
        layer.zero_grad()
        x.grad = None
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = run(x)
        y.backward(x.detach())
        del y
        peak = torch.cuda.max_memory_allocated() - before
        grads = [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
    notes = [*backend.failures, *(note for context in backend.contexts for note in context.notes)]
    assert not find(notes, *EAGER, *FAILED), notes
    return peak, [g.clone() for g in grads], backend.contexts[-1].providers


def test_room_of_one_mlp():
    """Of the size of an 8B model's, on 32,768 tokens: gate|up, its gradient and the activation take 4.4 GiB together; in 16 pieces, 0.3 GiB.

    Beside them stand y, dx and x's copy, 256 MiB each at most, and 0.35 GiB of weights."""
    torch.manual_seed(0)
    layer, x = MLP(4096, 14336), torch.randn(1, 32768, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_()
    untiled, expected, _ = measured(layer, x, RECOMPUTE)
    for tiles, bound in ((4, 2.75), (16, 1.75)):
        peak, grads, providers = measured(layer, x, Plan(tiles=tiles))
        assert providers["lora_mlp_tiled: joined"] == providers["lora_mlp_tiled_backward: joined"] == 1
        print(f"{tiles} pieces: {peak / GIB:.2f} GiB, whole {untiled / GIB:.2f}")
        assert peak < bound * GIB < untiled
        assert all(error(mine, theirs) < 1e-2 for mine, theirs in zip(grads, expected, strict=True))


SHAPE = dict(
    hidden_size=256,
    intermediate_size=2048,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=1024,
    max_position_embeddings=4096,
)


def curve(model, memory):
    model = tunecompile.optimize(copy.deepcopy(model), memory=memory)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    losses = []
    for length in (2048, 2048, 1900, 1600):  # symbolic sizes from the third on
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**zoo.batch(1024, 4, length, "cuda")).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, tunecompile.report(model)


def test_a_model_under_a_budget_that_nothing_else_fits():
    base = zoo.adapt(zoo.make("llama", **SHAPE).to("cuda", torch.bfloat16), r=16)
    expected, _ = curve(base, None)
    losses, report = curve(base, "1MiB")
    assert losses == pytest.approx(expected, rel=2e-3)
    assert all(plan["tiles"] > 1 for plan in report.memory["plans"]), report
    assert any("lora_mlp_tiled: joined" == name for region in report.regions for name in region.providers), report
    assert not find(report, *EAGER, *FAILED), report
