"""What layers save comes back as it was, under any loop; host memory is bounded and empty in the end. On a CPU, with real copies."""

import weakref
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tunecompile
from tests.support import zoo
from tests.support.compare import equal_bits
from tests.support.memory.copiers import LateCopier, Recorder
from tests.support.memory.copy_engine import HostCopyEngine
from tests.support.memory.offload_stack import Stack, empty, inputs, make_offload, offloaded, plain, run, wrap
from tunecompile.errors import ModifiedInPlace
from tunecompile.runtime.cuda_graphs import launch_bound
from tunecompile.runtime.memory.host.blocks import SavedHandle, give_back
from tunecompile.runtime.memory.host.pinned_pool import GRANULE
from tunecompile.runtime.memory.offload import Offload

CPU = torch.device("cpu")


def test_gradients_are_the_same():
    offload = make_offload(ahead=1)
    stack = offloaded(offload, keep_last=True)
    for seed in range(3):
        assert equal_bits(run(stack, inputs(seed)), plain(inputs(seed)))
        report = offload.report()
        stayed = report["bytes_out"] - report["bytes_back"]  # of the last call
        assert stayed > 0 and report["bytes_back"] > 0 and not report["refusals"]
        assert empty(offload)


def test_what_comes_back_is_on_the_device_of_its_copy():
    """Whatever torch makes tensors on by default."""
    saved = torch.arange(12.0).view(3, 4).half()[1:, 1:]
    handle = SavedHandle(None, SimpleNamespace(add=lambda tensor: 0), saved)
    with torch.device("meta"):
        found = handle.of(saved.clone(memory_format=torch.preserve_format).new_tensor(range(12)))
    assert found.device.type == "cpu" and found.dtype == torch.half
    assert torch.equal(found, saved) and found.stride() == saved.stride()


def test_the_hosts_time_for_copies_is_counted(monkeypatch):
    """Once a layer before and after it, and once a value that it saves; not what layers compute meanwhile."""
    now = iter(range(10**6))
    monkeypatch.setattr(launch_bound, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    offload, packed = make_offload(), []
    pack = offload._pack
    monkeypatch.setattr(offload, "_pack", lambda *given: packed.append(1) or pack(*given))
    stack = offloaded(offload)
    stack(inputs(0))
    assert packed and offload.spent.seconds == 2 * len(stack.layers) + len(packed)


def test_any_timing_of_the_copies():
    """Small pieces of host memory change hands all the time, and copies come as late as they may."""
    offload = make_offload(64 * GRANULE, copier=LateCopier())
    stack, reference = offloaded(offload, layers=8), Stack(layers=8)
    for seed in range(6):
        left = stack(inputs(99)) if seed % 2 else None  # no backward comes
        del left
        losses = [[model(inputs(seed)), model(inputs(seed + 1))] for model in (stack, reference)]
        for a, b in zip(*(pair if seed % 3 else reversed(pair) for pair in losses)):
            for loss in (a, b):
                loss.backward(retain_graph=seed % 3 == 2)
            if seed % 3 == 2:
                a.backward(), b.backward()
        assert all(map(torch.equal, stack.gradients(), reference.gradients())), seed
        del losses, loss, a, b
        assert empty(offload)


def test_weights_and_shared_arguments_are_not_copied_by_each_layer():
    model = tunecompile.optimize(zoo.adapt(zoo.make("llama", num_hidden_layers=4)), executor="eager")
    offload = make_offload()
    wrap(model, offload)
    zoo.step(model, zoo.batch())
    first, *others = offload.report()["bytes_out_by_layer"].values()
    assert len(set(others)) == 1 and first > others[0]  # the rotary tables, saved by all of them, went with the first
    largest = max(parameter.nbytes for layer in model._tunecompile.slots for parameter in layer.layer.parameters())
    assert largest > 256 and sum(p.nbytes for p in model._tunecompile.slots[1].layer.parameters()) > others[0]


def test_views_of_one_storage_are_copied_once():
    recorder = Recorder()
    run(offloaded(make_offload(copier=recorder), layers=3), inputs())
    assert [entry for entry in recorder.log if entry[0] == "out"] == [
        ("out", 4)
    ] * 3  # input, up's output, silu's output, product
    offload = make_offload()
    base = torch.randn(8, 64, requires_grad=True)
    with offload.layer(0, torch.nn.Identity()):
        doubled = base * 2
        left, right = doubled[:, 3:40:2], doubled.t()
        result = left.exp().sum() + (left * left).sum() + right.sin().sum()
    offload.settle()
    result.backward()
    other = base.detach().requires_grad_()
    doubled = other * 2
    (doubled[:, 3:40:2].exp().sum() + doubled[:, 3:40:2].square().sum() + doubled.t().sin().sum()).backward()
    torch.testing.assert_close(base.grad, other.grad)


def test_backward_twice():
    offload = make_offload()
    stack = offloaded(offload)
    loss = stack(inputs())
    loss.backward(retain_graph=True)
    first = stack.gradients()
    offload.begin_step()  # drops what lies on the device, and nothing else
    loss.backward(retain_graph=True)
    second = stack.gradients()
    loss.backward()
    for mine in (second, stack.gradients()):
        assert all(map(torch.equal, first, mine))
    assert all(map(torch.equal, first, plain(inputs())[1]))
    del loss
    assert empty(offload)


def test_each_backward_copies_each_byte_back_once():
    offload = make_offload()
    loss = offloaded(offload)(inputs())
    offload.settle()
    out = offload.report()["bytes_out"]
    assert out > 0
    for number in (1, 2, 3):
        loss.backward(retain_graph=True)
        offload.settle()
        report = offload.report()
        assert (report["bytes_out"], report["bytes_back"]) == (out, number * out)


def test_forward_without_backward_frees_everything():
    offload = make_offload()
    stack = offloaded(offload)
    loss = stack(inputs())
    assert offload.report()["host_bytes"] > 0
    del loss
    assert empty(offload)
    with torch.no_grad():
        stack(inputs())
    assert offload.report()["bytes_out"] == 0
    assert equal_bits(run(stack, inputs()), plain(inputs()))


def on_device(offload) -> bool:
    return any(block.device is not None for block in offload.blocks.known.values())


def test_part_of_the_backward():
    offload = make_offload()
    stack, reference = offloaded(offload), Stack()
    loss, expected = stack(inputs()), reference(inputs())
    mine = torch.autograd.grad(
        loss, list(stack.layers[4].parameters()), retain_graph=True
    )  # fetches layers ahead that nobody asks for
    assert all(
        map(torch.equal, mine, torch.autograd.grad(expected, list(reference.layers[4].parameters()), retain_graph=True))
    )
    assert on_device(offload)
    offload.begin_step()
    assert not on_device(offload)
    loss.backward()
    expected.backward()
    assert all(map(torch.equal, stack.gradients(), reference.gradients()))
    del loss
    assert empty(offload)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_layer_keeps_its_own(reentrant):
    offload, reference = make_offload(), plain(inputs().requires_grad_())
    stack = offloaded(offload)
    x = inputs().requires_grad_()
    offload.begin_step()

    def layer(x, index):
        with offload.layer(index, stack.layers[index]):
            return stack.layers[index](x)

    for index in range(len(stack.layers)):
        x = checkpoint(layer, x, index, use_reentrant=reentrant)
    loss = x.square().mean()
    loss.backward()
    assert equal_bits((loss.detach(), stack.gradients()), reference)
    assert offload.report()["bytes_out"] == 0 and len(offload.report()["refusals"]) >= 1


def test_the_users_own_hooks_come_first():
    offload = make_offload()
    stack = offloaded(offload)
    with torch.autograd.graph.save_on_cpu():
        result = run(stack, inputs())
    assert equal_bits(result, plain(inputs()))
    assert offload.report()["refusals"] == {"other hooks take the saved tensors": 0}


@pytest.mark.parametrize("when", ["inside", "after", "kept"])
def test_changes_in_place_are_refused(when):
    offload = make_offload()
    x = torch.randn(16, 16, requires_grad=True)
    with offload.layer(0, torch.nn.Identity(), (lambda tensor: False) if when == "kept" else None):
        y = x.exp()
        z = y * 2
        if when == "inside":
            y.add_(1)
    if when != "inside":
        y.detach().add_(1)
    offload.settle()
    with pytest.raises(ModifiedInPlace, match=r"\[16, 16\] is at version 1; expected version 0, saved by layer 0"):
        z.sum().backward()
    assert issubclass(ModifiedInPlace, RuntimeError)


def test_changes_in_place_behind_the_copy_do_no_harm():
    offload = make_offload()
    x = torch.randn(16, 16, requires_grad=True)
    with offload.layer(0, torch.nn.Identity()):
        y = x.exp()
        z = y * 2
    offload.settle()
    expected = 2 * y.detach().clone()
    with offload.layer(1, torch.nn.Identity()):
        y.detach().add_(1)
        more = y.detach().requires_grad_() * y.detach()  # saved anew: it is another value
    z.sum().backward()
    assert torch.equal(x.grad, expected)
    assert offload.report()["bytes_out"] == 2 * x.nbytes
    more.sum().backward()


def test_device_memory_is_freed():
    offload = make_offload()
    x = torch.randn(64, 64, requires_grad=True)
    with offload.layer(0, torch.nn.Identity()):
        y = x.exp()
        z = y.sum() * 2
    storage = weakref.ref(y)
    del y
    before = offload.blocks.known.values()
    (block,) = before
    offload.settle()
    assert storage() is None and block.device is None and block.identity.expired()
    del before, block
    z.backward()
    assert torch.equal(x.grad, 2 * x.exp()) and empty_after(z, offload)


def empty_after(result, offload) -> bool:
    del result
    return offload.report()["host_bytes"] == 0


def test_only_the_last_two_layers_wait_on_the_device():
    offload = make_offload()
    kept, x = [], torch.randn(8, 32)
    for index in range(5):
        layer = torch.nn.Linear(32, 32)
        with offload.layer(index, layer, (lambda _: False) if index == 3 else None):
            x = layer(x).sin()
        kept.append(sum(block.device is not None for block in offload.blocks.known.values()))
    assert kept == [2, 4, 4, 2, 2]  # each saves two storages; layer 3 keeps everything
    offload.settle()
    assert not on_device(offload)


def test_memory_is_given_back_behind_its_last_copy():
    """Else the next owner's bytes could be under way at once: both on the device and on the host."""
    told = []
    copier = SimpleNamespace(wait=lambda mark, device: told.append(("wait", mark, device)))
    store = SimpleNamespace(give=lambda stay: told.append(("give", stay)))
    dead = deque([("first", "on the device", "mark"), ("second", None, "mark"), ("third", "on the device", None)])
    give_back(dead, store, copier)
    assert told == [("wait", "mark", "on the device"), *(("give", stay) for stay in ("first", "second", "third"))]
    assert not dead


def test_prefetch_comes_two_layers_ahead():
    recorder = Recorder()
    offload = make_offload(copier=recorder)
    stack = offloaded(offload, layers=5, keep_last=True)
    loss = stack(inputs())
    offload.settle()
    fetched = []
    for index, layer in enumerate(stack.layers):
        layer.register_full_backward_hook(lambda *_, index=index: None)
    recorder.log.clear()
    inner = offload._reach
    offload._reach = lambda call: (inner(call), fetched.append((call.layer, len(recorder.log))))
    loss.backward()
    # In the backward of layer 4, which is kept, 3 and 2 are fetched; from then on, one more each.
    assert fetched == [(4, 2), (3, 3), (2, 4), (1, 4), (0, 4)]


@pytest.mark.parametrize("ahead, layers", [(0, [5]), (1, [5, 4]), (2, [5, 4, 3, 2])])
def test_the_disk_is_asked_twice_as_far_ahead(ahead, layers, monkeypatch):
    offload = make_offload(ahead=ahead)
    loss = offloaded(offload, layers=7, keep_last=True)(inputs())
    offload.settle()
    places = {id(block.stay): call.layer for call in offload.calls.values() for ref in call.blocks if (block := ref())}
    asked = []
    monkeypatch.setattr(offload.blocks.store, "prepare", lambda stay: asked.append(places[id(stay)]))
    offload._reach(offload.calls[offload.number])
    assert list(dict.fromkeys(asked)) == layers
    del loss


def test_host_memory_is_bounded():
    offload = make_offload(host_bytes=5 * GRANULE)
    stack = offloaded(offload)
    assert equal_bits(run(stack, inputs()), plain(inputs()))
    report = offload.report()
    assert report["peak_host_bytes"] == report["pinned_bytes"] == 5 * GRANULE
    assert list(report["refusals"]) == ["host memory is full"] and report["bytes_out"] > 0
    assert equal_bits(run(stack, inputs()), plain(inputs())) and empty(offload)


def test_without_pinned_memory_tensors_stay():
    class Poor(HostCopyEngine):
        def allocate(self, nbytes):
            raise torch.OutOfMemoryError("CUDA error: out of memory")

    offload = make_offload(copier=Poor())
    assert equal_bits(run(offloaded(offload), inputs()), plain(inputs()))
    (reason,) = offload.report()["refusals"]
    assert (
        reason == "no more pinned memory than 0 MiB: CUDA error: out of memory" and offload.report()["bytes_out"] == 0
    )


def test_what_outlives_the_step_is_not_copied_again():
    offload = make_offload()
    constant = torch.randn(32, 32)  # neither parameter nor buffer: a 4-bit weight's scales, say
    for step in range(3):
        offload.begin_step()
        x = torch.randn(32, 32, requires_grad=True)
        with offload.layer(0, torch.nn.Identity()):
            y = (x * constant).sum()
        assert offload.report()["bytes_out"] == (constant.nbytes if step == 0 else 0)
        y.backward()
        assert torch.equal(x.grad, constant)


def test_a_cpu_counts_and_copies_nothing():
    counting, copying = Offload(CPU, 1 << 26, smallest=256), make_offload()
    results = [run(offloaded(offload), inputs()) for offload in (counting, copying)]
    assert equal_bits(*results)
    a, b = counting.report(), copying.report()
    assert {key: a[key] for key in b} == b
    assert empty(counting) and counting.blocks.pool.slabs[0].is_meta
