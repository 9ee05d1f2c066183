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
#: family -> the seam's functions with the packages behind them, and the ops of a layer
FAMILIES = {
    "mamba2": (
        {
            "causal_conv1d_fn": ("causal_conv1d", "causal_conv1d_fn"),
            "mamba2_chunk_scan": ("mamba_ssm", "mamba_chunk_scan_combined"),
        },
        {"ssd_scan", "short_convolution"},
    ),
    "qwen3_5": (
        {
            "causal_conv1d_fn": ("causal_conv1d", "causal_conv1d_fn"),
            "torch_chunk_gated_delta_rule": ("fla", "chunk_gated_delta_rule"),
        },
        {"gated_delta_rule", "short_convolution"},
    ),
}
BOTH = ["mamba2", pytest.param("qwen3_5", marks=pytest.mark.slow)]


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


@pytest.mark.parametrize("family", BOTH)
def test_a_package_that_is_installed_is_called_by_eager_alone(family, monkeypatch):
    """Its kernels break graphs; in a layer they would be one graph before the call and one behind it."""
    reference, calls = hybrids.make(family, torch.float32), []
    home, (functions, ops) = hybrids.home_of(reference), FAMILIES[family]
    for name, (package, function) in functions.items():
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
    assert not calls and not fell_back(model) and ops <= ops_of(model)
    assert_close(found, zoo.step(reference, zoo.batch()), limit=1e-3)
    assert {*calls} == {*functions}


@pytest.mark.parametrize("family", BOTH)
def test_ops_stand_in_place_of_modules_of_the_hub(family, monkeypatch):
    """With `kernels` installed no function was transformers' own any more: loops were unrolled, documents not kept apart."""
    reference = hybrids.make(family, torch.float32)
    assert hub_modules(hybrids.home_of(reference), monkeypatch)
    model = optimized(copy.deepcopy(reference))
    found = zoo.step(model, zoo.batch())
    assert_close(found, zoo.step(reference, zoo.batch()), limit=1e-3)
    assert not fell_back(model) and not find(model, "kernel-function-replaced") and FAMILIES[family][1] <= ops_of(model)
    assert knows_documents(
        next(m for m in model.modules() if type(m).__name__.endswith(("Mamba2Block", "DecoderLayer")))
    )


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_kernel_of_the_hub_stays(late, monkeypatch):
    """`kernelize` replaces the module's forward, before `optimize` or after a step. The kernel halves: an op would not."""
    reference = hybrids.make("mamba2", torch.float32)
    home = hybrids.home_of(reference)
    module, written = hub_modules(home, monkeypatch)["causal_conv1d_fn"], home.causal_conv1d_fn

    def kernelize():
        plain = type(module).forward
        module.forward = types.MethodType(lambda self, *args, **kwargs: plain(self, *args, **kwargs) * 0.5, module)

    model = copy.deepcopy(reference)
    if late:
        before = zoo.step(optimized(model), zoo.batch())
        layer = model.backbone.layers[0]
        assert knows_documents(layer)
    kernelize()
    if not late:
        optimized(model)
    found = zoo.step(model, zoo.batch())
    assert_close(found, zoo.step(reference, zoo.batch()), limit=1e-3)
    assert not knows_documents(model.backbone.layers[0]) and written is module
    if late:
        assert abs(before[0] - found[0]) > 1e-4
    else:
        assert find(model, "kernel-function-replaced", subject="causal_conv1d_fn")


class HubNorm(nn.Module):
    """A layer of a kernel's repository, with a sum in place of the mean: it is seen where it is not called."""

    def forward(self, hidden_states):
        return self.weight * hidden_states * torch.rsqrt(hidden_states.pow(2).sum(-1, keepdim=True) + 1.0)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("some", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_kernel_in_place_of_a_modules_forward(late, some):
    """In all layers, or in the middle one alone, which shares its compiled code with the others otherwise."""
    reference = zoo.make("llama", num_hidden_layers=3)

    def kernelize(model):
        for layer in model.model.layers[1:2] if some else model.model.layers:
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
