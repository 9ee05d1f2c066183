"""What stands in a head's place: when it defers, and what it reads of the head."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from tests.support.heads import TOKENS, WIDTH, WORDS, deferred, head_of, linear, states
from tests.support.notes import has
from tunecompile._torch import modules
from tunecompile.errors import NoGradient
from tunecompile.notes import note
from tunecompile.ops import lora_linear
from tunecompile.runtime.loss_head import gradients, linear_head, losses
from tunecompile.runtime.loss_head.deferred import LazyTensor
from tunecompile.runtime.loss_head.linear_head import LinearHead, NotLinear
from tunecompile.runtime.loss_head.losses import result_dtype
from tunecompile.runtime.loss_head.slot import SPARSE, HeadSlot, Labelled
from tunecompile.runtime.step.mode import Mode
from tunecompile.runtime.step.state import Step


def slot_of(module, read=None, **state):
    told = []
    head = head_of(module, padded=lambda: read is not None, read=lambda *given: told.append(given) or read)
    return HeadSlot(Step(**state), head), told


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("active", [False, True])
def test_a_head_is_called_in_training_alone(training, active):
    """`generate` between steps calls it, too, in eval mode or without gradients."""
    module = linear().train(training)
    slot, _ = slot_of(module, mode=Mode.TRAIN if active else Mode.EAGER)
    with torch.no_grad():
        slot(states())
    assert not slot.called
    found = slot(states())
    assert slot.called is (training or active) and isinstance(found, LazyTensor) is active


@pytest.mark.parametrize("scoring", [False, True])
def test_scores_of_hidden_states_without_padding_are_of_whole_ones(scoring):
    module, whole = linear(), torch.zeros(2, TOKENS, WIDTH, dtype=torch.float64)
    slot, told = slot_of(module, read=whole, mode=Mode.SCORE if scoring else Mode.EAGER)
    hidden = states().detach()
    with torch.no_grad():
        found = slot(hidden)
    assert torch.equal(found, module(whole if scoring else hidden))
    assert [given[0] is hidden for given in told] == [True] * scoring
    for padded in (True, False):
        slot, told = slot_of(module, read=whole, mode=Mode.SCORE)
        slot.head.padded = lambda padded=padded: padded
        with torch.set_grad_enabled(padded):
            slot(states())
        assert told == []


def test_a_head_that_an_engine_places(monkeypatch):
    """It is looked for once, at the first call in training."""
    asked, calls = [], []
    host = types.SimpleNamespace(
        refused=None, gathers_for_loss=False, call=lambda f, args, kwargs: (calls.append(1), f(args, kwargs))[1]
    )
    monkeypatch.setattr("tunecompile.runtime.loss_head.slot.place", lambda module: asked.append(1) or host)
    host.product_dtype = lambda hidden: torch.float64
    slot, _ = slot_of(linear(), mode=Mode.TRAIN)
    for _ in range(2):
        assert isinstance(slot(states()), LazyTensor)
    assert asked == [1] and calls == [1, 1]
    host.refused = note("with-hooks")
    assert not isinstance(slot(states()), LazyTensor)
    assert has(slot.head.tally.refused, "head-eager", reason="with-hooks") and calls == [1, 1]


def test_a_frozen_heads_scores_wait_for_what_is_taken_of_them():
    module = linear()
    slot, _ = slot_of(module, mode=Mode.SCORE)
    with torch.no_grad():
        assert not isinstance(slot(states()), LazyTensor), "it is trained"
        module.requires_grad_(False)
        assert isinstance(slot(states()), LazyTensor)
        slot.step.mode = Mode.EAGER
        assert not isinstance(slot(states()), LazyTensor)


def test_what_is_no_call_of_one_tensor_is_the_modules_own():
    slot, _ = slot_of(linear(), mode=Mode.TRAIN)
    assert not isinstance(slot(input=states()), LazyTensor)
    slot.step.replaced = "torch.nn.functional.linear"
    assert not isinstance(slot(states()), LazyTensor)
    assert has(slot.head.tally.refused, "head-eager", reason="function-replaced")
    slot.step.replaced, slot.head.at_once = None, True
    assert not isinstance(slot(states()), LazyTensor)


def test_logits_have_the_dtype_of_autocast():
    slot, _ = slot_of(linear(torch.float32), mode=Mode.TRAIN)
    hidden = states(torch.float32)
    assert slot(hidden).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert slot(hidden).dtype is torch.bfloat16


def test_a_budget_settles_before_the_loss():
    settled = []
    budget = types.SimpleNamespace(settle=lambda: settled.append(1))
    slot, _ = slot_of(linear(), mode=Mode.TRAIN, budgets=(budget,))
    slot(states())
    assert settled == [1]


# -- labelled rows -------------------------------------------------------------------------------------------------------


def test_rows_without_labels_are_left_out_where_few_have_one(monkeypatch):
    """On a GPU, which a stand-in for its labels plays: the share is known a step late."""
    arrived = [False]
    monkeypatch.setattr("tunecompile.runtime.loss_head.slot.start_copy_to_host", lambda count: (count, event))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    event = types.SimpleNamespace(query=lambda: arrived[0])
    labelled, target = Labelled(), torch.tensor([1, -100, -100, 2])
    assert labelled.rows(target, -100) is None and labelled.pending[2] == 4
    assert labelled.rows(target, -100) is None, "it has not arrived"
    arrived[0] = True
    assert (
        labelled.rows(target, -100).tolist() == [0, 3] and labelled.share == 0.5 < SPARSE and labelled.pending is None
    )
    assert labelled.rows(torch.tensor([1, 1]), -100).tolist() == [0, 1] and labelled.share == 1.0
    assert labelled.rows(target[:0], -100) is None and labelled.rows(target, -100) is None


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_a_loss_of_labelled_rows_alone(reduction, monkeypatch):
    def labelled(target, ignored):
        assert target.shape == (10,) and ignored == -100
        return (target != ignored).nonzero().flatten()

    rows = []
    for name in ("linear_cross_entropy", "linear_cross_entropy_rows"):
        inner = getattr(losses, name)
        monkeypatch.setattr(losses, name, lambda *given, inner=inner: rows.append(len(given[0])) or inner(*given))
    module, hidden, target = linear(), states(), torch.tensor([1, -100, 3, 4, -100] * 2)
    head = head_of(module)
    head.labelled = types.SimpleNamespace(rows=labelled)
    found, real = (
        F.cross_entropy(logits.flatten(0, 1), target, reduction=reduction)
        for logits in (deferred(head, hidden), module(hidden))
    )
    torch.testing.assert_close(found, real)
    for ours, theirs in zip(*(torch.autograd.grad(each.sum(), [hidden, module.weight]) for each in (found, real))):
        torch.testing.assert_close(ours, theirs)
    assert not head.made and rows == [6]


# -- devices and dtypes --------------------------------------------------------------------------------------------------


def test_deferred_tensors_are_where_the_real_ones_will_be():
    for device in ("cpu", "meta"):
        like = torch.empty(2, 3, device="meta").t()
        found = LazyTensor(types.SimpleNamespace(meta=like, hidden=torch.empty(1, device=device)))
        assert found.device.type == device and found.shape == (3, 2) and found.stride() == (1, 3)


def test_autocast_is_asked_on_the_device_of_the_logits(monkeypatch):
    losses._under_autocast.cache_clear()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    with FakeTensorMode():  # whose tensors of two devices do not meet
        for function in (F.cross_entropy, torch.log_softmax):
            assert result_dtype(function, torch.float32, "cuda") is torch.float32
    losses._under_autocast.cache_clear()


def backward(losses, inputs):
    torch.autograd.backward(losses, inputs=inputs)


@pytest.mark.parametrize("differentiate", [torch.autograd.grad, backward])
@pytest.mark.parametrize("several", [False, True])
def test_gradients_at_logits_that_were_never_made(differentiate, several):
    """They would be none, or zero."""
    logits = deferred(head_of(linear()), states())
    loss = F.cross_entropy(logits.flatten(0, 1), torch.ones(2 * TOKENS, dtype=torch.int64))
    with pytest.raises(NoGradient, match=differentiate.__name__):
        differentiate([loss, loss] if several else loss, [logits])


# -- hooks of engines ----------------------------------------------------------------------------------------------------


def of_engine(monkeypatch, engine):
    """A hook that an engine registers at all outputs."""

    def hook(grad):
        seen.append(grad.shape)

    seen: list = []
    if engine == "fsdp":
        monkeypatch.setattr(gradients, "is_its_own", lambda given: given is hook)
        monkeypatch.setattr(gradients, "waits_for_backward", lambda given: True)
    elif engine == "deepspeed":
        hook.__module__ = "deepspeed.runtime.utils"
    else:
        monkeypatch.setattr(gradients, "of_fabric", lambda given: False if given is hook else None)
    return hook, seen


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed", "fabric"])
def test_hooks_of_engines_wait_for_the_logits(engine, monkeypatch):
    """Beside a loss, which is an output as well. They can be removed again, before and after."""
    hook, seen = of_engine(monkeypatch, engine)
    for removed, count in (("never", 1), ("before they are made", 0), ("behind", 0)):
        head = head_of(linear())
        logits = deferred(head, states())
        F.cross_entropy(logits.flatten(0, 1), torch.ones(2 * TOKENS, dtype=torch.int64))
        handle = logits.register_hook(hook)
        assert not head.made
        if removed == "before they are made":
            handle.remove()
        loss = logits.square().mean()
        if removed == "behind":
            handle.remove()
        loss.backward(retain_graph=True)
        assert head.made == 1 and len(seen) == count, removed
        seen.clear()
    later = logits.register_hook(hook)
    loss.backward(retain_graph=True)
    later.remove()
    loss.backward()
    assert len(seen) == 1


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_without_a_loss_they_are_called(engine, monkeypatch):
    hook, seen = of_engine(monkeypatch, engine)
    head = head_of(linear())
    logits = deferred(head, states())
    logits.register_hook(hook)
    assert head.made == 1
    logits.sum().backward()
    assert len(seen) == 1


# -- the product of a head -----------------------------------------------------------------------------------------------


def test_the_head_is_called_with_its_hidden_states():
    module, hidden = linear(), states()
    assert torch.equal(linear_head._head(module, hidden), module(hidden))


class Drawn:
    """A graph of a head, drawn by hand, and values for its inputs."""

    def __init__(self, *inputs, dtype=torch.float32):
        self.graph, self.dtype = Graph(), dtype
        self.inputs = [self.graph.placeholder(name) for name in inputs]
        for node in self.inputs:
            node.meta["example_value"] = torch.empty(1, dtype=dtype)

    def call(self, target, *args, dtype=None, method=False):
        make = self.graph.call_method if method else self.graph.call_function
        node = make(target, args)
        node.meta["example_value"] = torch.empty(1, dtype=dtype or self.dtype)
        return node

    def to(self, node, dtype):
        return self.call("to", node, dtype, dtype=dtype, method=True)

    def read(self, *outputs):
        self.graph.output(tuple(outputs))
        values = [torch.full((2, 2), float(place), dtype=self.dtype) for place in range(len(self.inputs))]
        return linear_head._read(self.graph)(values), values


def adapted(drawn, own=(), count=1):
    x, weight, bias, down, up = drawn.inputs
    made = drawn.call(
        lora_linear.overload, x, list(own), [weight] * count, [bias], [down], [up], [0.25], torch.float32, "dense"
    )
    return drawn.call(linear_head.getitem, made, 0), made


def test_a_linear_is_read():
    for count in (2, 3):
        drawn = Drawn(*("x", "weight", "bias")[:count])
        found, values = drawn.read(drawn.call(modules.linear, *drawn.inputs))
        assert found.weight is values[1] and found.dtype is torch.float32 and found.down is found.up is None
        assert found.bias is (values[2] if count == 3 else None) and found.scale == 1.0


def test_an_adapter_is_read():
    drawn = Drawn("x", "weight", "bias", "down", "up")
    y, made = adapted(drawn)
    drawn.call(linear_head.getitem, made, 1)  # what is saved for the backward pass
    found, values = drawn.read(y)
    assert all(a is b for a, b in zip((found.weight, found.bias, found.down, found.up), values[1:]))
    assert (found.scale, found.dtype, found.adapter_dtype) == (0.25, torch.float32, torch.float32)


def test_casts_that_lose_nothing_are_read_through():
    drawn = Drawn("x", "weight", dtype=torch.bfloat16)
    x, weight = drawn.inputs
    wide = [drawn.to(each, torch.float32) for each in (x, weight)]
    y = drawn.to(drawn.call(modules.linear, *wide, dtype=torch.float32), torch.float32)
    found, values = drawn.read(y)
    assert found.weight is values[1] and found.dtype is torch.float32


def refused(drawn, *outputs):
    with pytest.raises(NotLinear) as caught:
        drawn.read(*outputs)
    return caught.value.reason.code


def test_what_is_no_product_is_refused():
    drawn = Drawn("x", "weight")
    y = drawn.call(modules.linear, *drawn.inputs)
    assert refused(drawn, y, y) == "returns-more"
    drawn = Drawn("x", "weight")
    assert refused(drawn, drawn.call(torch.mul, *drawn.inputs)) == "no-linear"
    drawn = Drawn("x", "weight")
    x, weight = drawn.inputs
    assert refused(drawn, drawn.call(modules.linear, x, drawn.call(torch.neg, weight))) == "computed-weights"
    drawn = Drawn("x", "weight")
    y = drawn.call(modules.linear, *drawn.inputs)
    drawn.call(torch.neg, y)
    assert refused(drawn, y) == "more-than-product"
    drawn = Drawn("x", "weight", "bias", "down", "up")
    y, made = adapted(drawn)
    drawn.call(torch.neg, drawn.call(linear_head.getitem, made, 1))
    assert refused(drawn, y) == "more-than-product"
    drawn = Drawn("x", "weight", "bias", "down", "up")
    _, made = adapted(drawn)
    assert refused(drawn, drawn.call(linear_head.getitem, made, 1)) == "no-linear"
    drawn = Drawn("x", "weight", "bias", "down", "up")
    assert refused(drawn, adapted(drawn, own=[drawn.inputs[0]])[0]) == "adapter-with-dropout"
    drawn = Drawn("x", "weight", "bias", "down", "up")
    assert refused(drawn, adapted(drawn, count=2)[0]) == "several-weights"
    drawn = Drawn("x", "weight")
    assert refused(drawn, drawn.to(drawn.call(modules.linear, *drawn.inputs), torch.float64)) == "no-linear"
    drawn = Drawn("x", "weight")
    x, weight = drawn.inputs
    narrow = drawn.to(weight, torch.float16)
    assert refused(drawn, drawn.call(modules.linear, x, narrow)) == "computed-weights", "the cast loses digits"


def test_a_written_head_has_changed():
    module = linear()
    made = LinearHead(module.weight, module.bias, torch.float64)
    assert not made.changed, "its state was not noted"
    made = LinearHead(module.weight, module.bias, torch.float64, state=made.state_now())
    assert not made.changed and made.vocabulary == WORDS and made.inner(states()) is None and made.outer() is None
    with torch.no_grad():
        module.bias.add_(1)
    assert made.changed
    made = LinearHead(module.weight, None, torch.float64, state=LinearHead(module.weight, None, None).state_now())
    module.weight.data = module.weight.data.clone()
    assert made.changed, "its memory was replaced, as engines do that gather weights"


class Elsewhere(nn.Parameter):
    """A weight without an address of its own, of several processes."""

    def data_ptr(self):
        raise RuntimeError("nowhere")


def test_a_weight_without_an_address_is_told_by_its_version():
    module = nn.Linear(WIDTH, WORDS, bias=False)
    module.weight = Elsewhere(torch.ones(WORDS, WIDTH))
    made = LinearHead(module.weight, None, None, state=LinearHead(module.weight, None, None).state_now())
    assert not made.changed
    with torch.no_grad():
        module.weight.mul_(2)
    assert made.changed


def test_a_head_that_keeps_its_results_is_found():
    module = nn.Sequential(linear())
    tracer = types.SimpleNamespace(module=module)
    before = [dict(vars(each)) for each in module.modules()]
    keeps = linear_head.HeadTracer._keeps_something
    assert not keeps(tracer, before)
    module[0].last = 1
    assert keeps(tracer, before) and not hasattr(module[0], "last") and not keeps(tracer, before)


def test_operations_without_overrides_get_all_their_arguments():
    logits = deferred(head_of(linear()), states())
    real, ones = linear()(states()).detach(), torch.ones(WORDS, dtype=torch.float64)
    run = LazyTensor.__torch_dispatch__
    torch.testing.assert_close(run(torch.ops.aten.add.Tensor, (), (logits, ones), {"alpha": 3}), real + 3)
    torch.testing.assert_close(run(torch.ops.aten.sum.dim_IntList, (), (logits, [-1])), real.sum(-1))
