"""torch's `checkpoint_wrapper` around layers: they are recomputed inside their compiled code, as their plan says."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

import tunecompile
from tests.support.notes import has

BOTH = [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x, scale=None, negative=False):
        y = self.down(torch.tanh(self.up(x))) * scale
        return x - y if negative else x + y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.scale = nn.ModuleList(Layer() for _ in range(3)), nn.Parameter(torch.ones(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=self.scale, negative=True)
        return x.square().mean()


def wrap(model, kind=CheckpointImpl.NO_REENTRANT, **options):
    for place, layer in enumerate(model.layers):
        model.layers[place] = checkpoint_wrapper(layer, kind, **options)
    return model


def step(model):
    model.zero_grad()
    model(torch.linspace(-1, 1, 48).view(2, 3, 8).requires_grad_()).backward()
    return {name.replace("_checkpoint_wrapped_module.", ""): each.grad for name, each in model.named_parameters()}


def optimized(model):
    return tunecompile.optimize(model.train(), executor="eager")


def function(model):
    return vars(model.layers[1])["checkpoint_fn"]


def test_a_policy_that_says_nothing():
    """Dynamo has no such name, and a step ended with its error."""
    model = optimized(wrap(Model(), context_fn=noop_context_fn))
    torch.testing.assert_close(step(model), step(Model()))
    assert has(model, "checkpointing-is-budget")


@pytest.mark.parametrize("kind", BOTH)
def test_arguments_by_name_reach_the_layer(kind):
    """And the budget is what checkpoints would need."""
    model = optimized(wrap(Model(), kind))
    torch.testing.assert_close(step(model), step(Model()))
    assert has(model, "checkpointing-is-budget") and tunecompile.report(model).compiles


@pytest.mark.parametrize("kind", BOTH)
def test_wrapped_behind_optimize(kind):
    """The compiled layer is inside the checkpoint, which repeats it."""
    model = wrap(optimized(Model()), kind)
    torch.testing.assert_close(step(model), step(Model()))


def test_the_wrapper_has_its_function_again():
    model = wrap(Model())
    before = function(model)
    step(optimized(model))
    assert function(model) is not before and function(copy.deepcopy(model)).func is checkpoint
    assert function(tunecompile.restore(model)) is before


def doubled(run, *args, calls, **kwargs):
    """A function that does more than checkpoint."""
    calls.append(0)
    return checkpoint(run, *args, use_reentrant=False, **kwargs)


POLICY = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


@pytest.mark.parametrize("options", [{"context_fn": POLICY}, {"checkpoint_fn": functools.partial(doubled, calls=[])}])
def test_what_does_more_than_checkpoint_stays(options):
    """What is saved by a policy of the user's, for one."""
    model = optimized(wrap(Model(), **options))
    before = function(model)
    torch.testing.assert_close(step(model), step(Model()))
    assert function(model) is before and not has(model, "checkpointing-is-budget")


class Normed(nn.Module):
    """A layer that counts its calls, and updates a mean of what it saw."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return x + self.norm(self.linear(x).mT).mT


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.reentrant = nn.ModuleList(Normed() for _ in range(3)), reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "executor, reentrant, times",
    [("eager", True, 2), ("eager", False, 1)],
)
def test_buffers_that_layers_update_under_a_checkpoint(executor, reentrant, times):
    """Twice a step, as in eager. Op by op a repetition ends with the last saved tensor, before buffers are written."""
    reference = Checkpointed(reentrant).train()
    model = tunecompile.optimize(copy.deepcopy(reference), executor=executor)
    for seed in range(2):
        for each in (model, reference):
            torch.manual_seed(seed)
            each(torch.randn(4, 5, 8).requires_grad_()).backward()
    counts = [[layer.norm.num_batches_tracked.item() for layer in each.layers] for each in (model, reference)]
    assert counts == [[2 * times] * 3, [4] * 3]
