"""Layers with habits: hooks, state, odd signatures, refusals. Right numbers everywhere, and the report says what was refused."""

import copy

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.models.custom import WIDTH, trained_beside_eager
from tests.support.notes import EAGER, find, has

pytestmark = pytest.mark.filterwarnings("ignore")


class Habit(nn.Module):
    """A layer to inherit from, and below it the model that runs three of them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def step(self, x):
        return x + torch.tanh(self.linear(x))

    def forward(self, x, **_):
        return self.step(x)


class Stack(nn.Module):
    def __init__(self, layer: type, count: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(4))


class OnlyKeywords(Habit):
    def forward(self, *, hidden, scale=1.0, mask=None):
        return self.step(hidden) * scale if mask is None else self.step(hidden) * mask


class KeywordStack(Stack):
    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(hidden=x, scale=0.5, mask=None if index else torch.ones(2, 1, 1))
        return x


def test_layers_called_by_keyword_only():
    report = trained_beside_eager(KeywordStack(OnlyKeywords), X)
    assert report.compiles == 2 and not report.notes[1:], report


class Appending(Habit):
    def forward(self, x, seen: list, counts: dict):
        x = self.step(x)
        seen.append(x)
        counts["layers"] = counts.get("layers", 0) + 1
        return x


class AppendingStack(Stack):
    def forward(self, x):
        seen, counts = [], {}
        for layer in self.layers:
            x = layer(x, seen, counts)
        assert len(seen) == len(self.layers) == counts["layers"]
        return sum(h.square().mean() * (i + 1) for i, h in enumerate(seen))


def test_layers_that_append_to_an_argument():
    trained_beside_eager(AppendingStack(Appending), X, loss=lambda out: out)


class InPlace(Habit):
    def forward(self, x):
        h = self.linear(x)
        h += x
        h[:, 0] = 0
        return h.relu_()


def test_layers_that_write_in_place():
    trained_beside_eager(Stack(InPlace), X)


class Counting(Habit):
    """A buffer is written in each step, and a running mean kept."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.step(self.norm(x.transpose(1, 2)).transpose(1, 2))


def test_layers_that_keep_state():
    model = Stack(Counting)
    trained_beside_eager(model, X)
    assert [layer.calls.item() for layer in model.layers] == [2, 2, 2]
    assert all(layer.norm.num_batches_tracked == 2 for layer in model.layers)


class Printing(Habit):
    def forward(self, x):
        h = self.linear(x)
        print("inside a layer")
        return x + torch.tanh(h)


def test_a_graph_break_inside_a_layer(capsys):
    report = trained_beside_eager(Stack(Printing), X)
    assert capsys.readouterr().out.count("inside a layer") == 12
    assert has(report, "graph-break", detail="test_habits.py"), report


class Unpacking(Habit):
    """Whole numbers become weights, by a scale that learns. HQQ's zero points were made in inference mode as these are."""

    def __init__(self):
        super().__init__()
        self.packed = torch.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH).byte()
        self.zero, self.scale = torch.full((WIDTH, 1), 100.0), nn.Parameter(torch.full((WIDTH, 1), 0.01))

    def forward(self, x):
        weight = (self.packed.float() - self.zero) * self.scale
        torch._dynamo.graph_break()  # as PEFT's DoRA does: the weight is a graph of its own, and its backward unpacks
        return self.step(x @ weight)


@pytest.mark.parametrize("before", [False, True])
def test_inference_tensors_in_layers_that_learn(before):
    """From the first batch on, or in place of ordinary ones, for which there is a graph."""
    model = Stack(Unpacking)
    ours = tunecompile.optimize(copy.deepcopy(model), executor="eager")
    for inference in (before, True):
        for layer in [*model.layers, *ours.layers] if inference else []:
            with torch.inference_mode():
                layer.zero = layer.zero.clone()
        for each in (model, ours):
            each.zero_grad()
            each(X).square().mean().backward()
        for mine, theirs in zip(ours.parameters(), model.parameters()):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    report = tunecompile.report(ours)
    assert report.compiles == 3 - before and not find(report, *EAGER), report


class Reading(Habit):
    def forward(self, x):
        return self.step(x) if x.abs().max().item() > 1e9 else self.step(-x)


def test_a_layer_that_reads_a_number(capsys):
    report = trained_beside_eager(Stack(Reading), X)
    assert find(report, "graph-break", *EAGER), report


class NotUnderCompile(Habit):
    def forward(self, x):
        if torch.compiler.is_compiling():
            raise RuntimeError("this layer is not to be compiled")
        return self.step(x)


def test_a_layer_that_refuses_to_be_compiled():
    report = trained_beside_eager(Stack(NotUnderCompile), X)
    assert find(report, *EAGER), report


class Disabled(Habit):
    @torch.compiler.disable
    def forward(self, x):
        return self.step(x)


def test_a_layer_that_is_kept_from_dynamo():
    report = trained_beside_eager(Stack(Disabled), X)
    assert report.compiles == 0 and has(report, "ran-eagerly", reason="skipped-by-dynamo"), report


@torch.library.custom_op("tunecompile_tests::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    return x.cos()


@picky.register_fake
def _(x):
    raise RuntimeError("expected inputs of another type")


class Picky(Habit):
    def forward(self, x):
        return self.step(x + picky(x.detach()))


def test_an_op_that_takes_real_tensors_only():
    report = trained_beside_eager(Stack(Picky), X)
    assert has(report, "ran-eagerly", reason="not-traceable", times=" 6 times"), report
    assert has(report, "not-traceable", detail="RuntimeError('expected inputs of another type"), report


def test_a_callers_mistake_is_told_as_without_us_and_forgotten():
    model = tunecompile.optimize(Stack(Habit).train(), executor="eager")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        model(torch.randn(2, 7, WIDTH + 1))
    assert type(raised.value) is RuntimeError
    model(X).sum().backward()
    report = tunecompile.report(model)
    assert report.compiles and not find(report, *EAGER), report


class Failing(Habit):
    def forward(self, x):
        if x.shape[1] == 5:
            raise ValueError("rows of five are not supported")
        return self.step(x)


def test_a_layers_own_error_reaches_the_user():
    model = tunecompile.optimize(Stack(Failing).train(), executor="eager")
    with pytest.raises(ValueError, match="rows of five"):
        model(X)
    x = torch.randn(2, 6, WIDTH)
    expected = copy.deepcopy(model)(x)
    assert torch.allclose(model(x), expected, atol=1e-6)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3  # deliberately not the derivative


class OwnFunction(Habit):
    def forward(self, x):
        return self.step(Twice.apply(x))


def test_a_users_autograd_function_is_obeyed():
    trained_beside_eager(Stack(OwnFunction), X)


def test_broken_backend_leaves_the_region_eager(monkeypatch):
    from tunecompile.compiler import backend

    def fail(*_):
        raise RuntimeError("out of ideas")

    monkeypatch.setattr(backend, "run_stage", fail)
    report = trained_beside_eager(Stack(Habit), X)
    assert report.compiles == 0 and has(report, "compiled-without-rewrites", detail="out of ideas"), report


class Unlike(nn.Module):
    """Layers of two classes, one of them shared, one skipped in training."""

    def __init__(self):
        super().__init__()
        shared = Habit()
        self.layers = nn.ModuleList([shared, OwnFunction(), shared, Habit()])

    def forward(self, x):
        for layer in list(self.layers)[:3]:
            x = layer(x)
        return x


def test_lists_of_unlike_shared_and_unused_layers():
    report = trained_beside_eager(Unlike(), X)
    assert report.compiles >= 1, report


class WritesIntoItsInput(Habit):
    def forward(self, x):
        return self.step(x.mul_(0.5))


class Copied(Stack):
    def forward(self, x):
        self.given = x.clone()
        return super().forward(self.given)


def test_a_first_layer_that_writes_into_its_input():
    model = Copied(WritesIntoItsInput)
    trained_beside_eager(model, X)
    assert torch.equal(model.given, 0.5 * X)
    trained_beside_eager(untouched := Copied(Habit), X)
    assert not untouched.given.requires_grad


class WritesItsWeightIntoItsInput(Habit):
    def forward(self, x):
        return self.step(x.mul_(self.linear.bias + 1))


class UsesItAgain(Stack):
    """What it gives to the first layer: with a gradient and as a view of something, or neither."""

    def __init__(self, kind, trained):
        super().__init__(kind)
        self.embed = nn.Parameter(torch.ones(WIDTH)) if trained else None

    def forward(self, x):
        given = x.clone() if self.embed is None else (x * self.embed).flatten(0, 1).view(x.shape)
        return super().forward(given) + given


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", [WritesIntoItsInput, WritesItsWeightIntoItsInput])
def test_what_a_first_layer_writes_has_its_gradient_where_it_is_read_again(kind, trained):
    trained_beside_eager(UsesItAgain(kind, trained), X)


def test_layers_below_the_first_trained_one_have_no_backward():
    model = tunecompile.optimize(Stack(Habit), executor="eager")
    for layer in model.layers[:2]:
        layer.requires_grad_(False)
    seen = []
    model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    model(X).sum().backward()
    assert seen == [False] and model.layers[2].linear.weight.grad is not None


def test_shared_layers():
    layer = Habit()
    model = Stack(Habit)
    model.layers = nn.ModuleList([layer, layer, Habit()])
    report = trained_beside_eager(model, X)
    assert report.compiles == 1, report
    tunecompile.restore(model)
    assert not [m for m in model.modules() if m._compiled_call_impl is not None]


def test_half_of_the_layers_compiled_by_the_user():
    model = Stack(Habit)
    model.layers[0].compile(backend="aot_eager")
    theirs = model.layers[0]._compiled_call_impl
    report = trained_beside_eager(model, X)
    assert has(report, "compiled-already", subject="layers.0") and report.regions[0].layers == 2, report
    tunecompile.restore(model)
    assert model.layers[0]._compiled_call_impl is theirs


def test_hooks_that_come_and_go_after_compilation():
    """transformers installs its own when hidden states are first asked for."""
    model = tunecompile.optimize(Stack(Habit).train(), executor="eager")
    seen: list = []
    model(X).sum().backward()
    handles = []
    for layer in model.layers:
        handles.append(layer.register_forward_hook(lambda module, args, out: seen.append(out.detach().sum().item())))
    for _ in range(2):
        model(X).sum().backward()
    assert len(seen) == 6 and len(set(seen)) == 3
    handles.pop().remove()
    model(X).sum().backward()
    assert len(seen) == 8
    for handle in handles:
        handle.remove()
    model(X).sum().backward()
    assert len(seen) == 8


def replica_of(model):
    """What nn.parallel.replicate makes: shallow copies of all modules, with copies of the parameters that lead back to them."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, copied in copies.items():
        for name, child in module._modules.items():
            copied._modules[name] = copies.get(child)
        for name, parameter in module._parameters.items():
            if parameter is None:
                copied._parameters[name] = None
            else:
                setattr(copied, name, parameter * 1)
    return copies[model]


@pytest.mark.slow
def test_replicas_of_data_parallel():
    """They run as they would without us, and the original goes on compiled."""
    reference = zoo.adapt(zoo.make("llama"))
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    inputs, gradients = zoo.batch(), []
    for m in (model, reference):
        m.train()
        replica_of(m)(**inputs).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in m.named_parameters() if p.grad is not None})
    assert len(gradients[1]) and max(zoo.errors(*gradients).values()) < 1e-6
    assert not tunecompile.report(model).compiles and has(model, "replicas")
    assert all(layer._compiled_call_impl is not None for layer in model.base_model.model.model.layers)
    zoo.step(model, inputs)
    assert tunecompile.report(model).compiles
