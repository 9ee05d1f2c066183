"""Kernels of packages and of the hub behind transformers' functions and modules: ops stand there, or the user's kernel stays."""

import copy
import functools
import sys
import types

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_close
from tests.support.models import hybrids
from tests.support.models.pairs import optimized
from tests.support.notes import fell_back, find
from tunecompile.integrations.kernel_functions import packages
from tunecompile.integrations.kernel_functions.substitute import WRAPPER, knows_documents

hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")
if not hasattr(hub_kernels, "use_kernel_func_from_hub_with_fallback"):
    pytest.skip("this transformers has another seam", allow_module_level=True)
#: the seam's functions in Mamba 2, with the packages behind them; and the ops of a layer
FUNCTIONS = {
    "causal_conv1d_fn": ("causal_conv1d", "causal_conv1d_fn"),
    "mamba2_chunk_scan": ("mamba_ssm", "mamba_chunk_scan_combined"),
}
OPS = {"ssd_scan", "short_convolution"}


def ops_of(model):
    return {name.partition(":")[0] for region in tunecompile.report(model).regions for name in region.providers}


def as_hub_module(function):
    """What the package `kernels` makes of a function: a module, so that a kernel may take its place."""

    class Func(nn.Module):
        kernel_layer_name = "a_layer"

        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    Func.__module__ = "kernels.layer.layer"
    return Func()


def hub_modules(home, patch):
    """All of a file's functions with kernels behind them, as `kernels` leaves them where it is installed."""
    made = {}
    for name, value in list(vars(home).items()):
        if isinstance(value, types.FunctionType) and value.__globals__.get("__name__") == WRAPPER:
            made[name] = as_hub_module(value)
            patch.setattr(home, name, made[name])
    return made


def test_a_package_that_is_installed_is_called_by_eager_alone(monkeypatch):
    """Its kernels break graphs; in a layer they would be one graph before the call and one behind it."""
    reference, calls = hybrids.make("mamba2", torch.float32), []
    home = hybrids.home_of(reference)
    for name, (package, function) in FUNCTIONS.items():
        written = getattr(home, name).__wrapped__

        @torch._dynamo.disable
        @functools.wraps(written)  # parameters that a kernel does not name are not handed to it
        def kernel(*args, written=written, name=name, **kwargs):
            calls.append(name)
            return written(*args, **kwargs)

        inside = hub_kernels._KERNELS_INTERNAL_PATH_MAPPINGS.get(function)
        where = f"{package}.{inside}" if inside else package
        parts = where.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        setattr(sys.modules[where], function, kernel)
        wrapped = hub_kernels.use_kernel_func_from_hub_with_fallback(function, package)(written)
        monkeypatch.setattr(home, name, wrapped)
    monkeypatch.setattr(packages, "_is_there", lambda package: package in sys.modules)
    model = optimized(copy.deepcopy(reference))
    found = zoo.step(model, zoo.batch())
    assert not calls and not fell_back(model) and ops_of(model) >= OPS
    assert_close(found, zoo.step(reference, zoo.batch()), limit=1e-3)
    assert {*calls} == {*FUNCTIONS}


def test_ops_stand_in_place_of_modules_of_the_hub(monkeypatch):
    """With `kernels` installed no function was transformers' own any more: loops were unrolled, documents not kept apart."""
    reference = hybrids.make("mamba2", torch.float32)
    assert hub_modules(hybrids.home_of(reference), monkeypatch)
    model = optimized(copy.deepcopy(reference))
    found = zoo.step(model, zoo.batch())
    assert_close(found, zoo.step(reference, zoo.batch()), limit=1e-3)
    assert not fell_back(model) and not find(model, "kernel-function-replaced") and ops_of(model) >= OPS
    assert knows_documents(model.backbone.layers[0])


def test_a_kernel_of_the_hub_stays(monkeypatch):
    """`kernelize` replaces the module's forward. The kernel halves: an op would not."""
    reference = hybrids.make("mamba2", torch.float32)
    home = hybrids.home_of(reference)
    module, written = hub_modules(home, monkeypatch)["causal_conv1d_fn"], home.causal_conv1d_fn

    def kernelize():
        plain = type(module).forward
        module.forward = types.MethodType(lambda self, *args, **kwargs: plain(self, *args, **kwargs) * 0.5, module)

    kernelize()
    model = optimized(copy.deepcopy(reference))
    assert_close(zoo.step(model, zoo.batch()), zoo.step(reference, zoo.batch()), limit=1e-3)
    assert not knows_documents(model.backbone.layers[0]) and written is module
    assert find(model, "kernel-function-replaced", subject="causal_conv1d_fn")


class HubNorm(nn.Module):
    """A layer of a kernel's repository, with a sum in place of the mean: it is seen where it is not called."""

    def forward(self, hidden_states):
        return self.weight * hidden_states * torch.rsqrt(hidden_states.pow(2).sum(-1, keepdim=True) + 1.0)


@pytest.mark.parametrize("late", [False, True])
def test_a_kernel_in_place_of_a_modules_forward(late):
    """Before `optimize`, or after a step."""
    reference = zoo.make("llama", num_hidden_layers=3)

    def kernelize(model):
        for layer in model.model.layers:
            layer.input_layernorm.forward = types.MethodType(HubNorm.forward, layer.input_layernorm)

    model = copy.deepcopy(reference)
    if late:
        zoo.step(optimized(model), zoo.batch())
    kernelize(model)
    if not late:
        optimized(model)
    kernelize(reference)
    assert_close(zoo.step(model, zoo.batch()), zoo.step(reference, zoo.batch()), limit=1e-3)
    assert not fell_back(model)


def test_a_forward_that_kernelize_put_back_is_as_before():
    """It does so for each module without a kernel for the device, as on a CPU."""
    reference = zoo.make("llama", num_hidden_layers=2)
    model = copy.deepcopy(reference)
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = types.MethodType(type(module).forward, module)
    batch = zoo.batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :5] = 0
    assert_close(zoo.step(optimized(model), batch), zoo.step(reference, batch), limit=1e-3)
    assert "rms_norm" in ops_of(model) and not fell_back(model)
    assert not find(model, "unknown-module")
