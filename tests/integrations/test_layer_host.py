"""What slots are told by hosts of engines, as each of the four keeps it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tunecompile.integrations.accelerate import DeviceMapLayer
from tunecompile.integrations.deepspeed import LEAF, Zero3Layer
from tunecompile.integrations.fsdp import FsdpHead, FsdpLayer
from tunecompile.integrations.layer_host import LayerHost

POLICY = SimpleNamespace(cast_forward_inputs=True, param_dtype=torch.bfloat16)
HOSTS = {
    "none": lambda layer: LayerHost(layer),
    "device_map": lambda layer: DeviceMapLayer(layer, (layer,)),
    "ZeRO-3": lambda layer: Zero3Layer(layer, (), marked=True),
    "FSDP2": lambda layer: FsdpLayer(layer, alone=True),
    "FSDP2's head": lambda layer: FsdpHead(layer, POLICY),
}
#: engine, alone, weights_stay, gathers_for_loss
SAID = {
    "none": ("", False, True, False),
    "device_map": ("accelerate", False, True, False),
    "ZeRO-3": ("ZeRO-3", False, False, True),
    "FSDP2": ("FSDP2", True, False, False),
    "FSDP2's head": ("FSDP2", False, False, True),
}
hosts = pytest.mark.parametrize("name", HOSTS)


@hosts
def test_a_host_keeps_the_protocol(name):
    host: Any = HOSTS[name](nn.Linear(4, 4))
    assert isinstance(host, LayerHost)
    assert (host.engine, host.alone, host.weights_stay, host.gathers_for_loss) == SAID[name] and host.refused == ""
    for method in ("around", "call", "product_dtype", "has_other_hooks", "release"):
        wanted, found = (inspect.signature(getattr(kind, method)) for kind in (LayerHost, type(host)))
        assert wanted.parameters.keys() == found.parameters.keys(), method


@hosts
def test_a_call_gets_its_arguments_and_its_output(name):
    """Through both halves, one inside the other, as slots do it. The layer is afterwards as it was."""
    layer = nn.Linear(4, 4)
    host, before = HOSTS[name](layer), dict(vars(layer))

    def run(args: tuple, kwargs: dict) -> Any:
        return layer.forward(*args) * kwargs["scale"]

    x = torch.randn(2, 4)
    output = host.around(lambda args, kwargs: host.call(run, args, kwargs), (x,), {"scale": 2})
    torch.testing.assert_close(output, 2 * layer(x))
    assert vars(layer) == before


@hosts
def test_whose_hooks_run_where(name):
    """FSDP2's hooks of a layer run around all, those of ZeRO-3 and of a head around each call, and once in all."""
    layer, seen = nn.Linear(4, 4), []
    layer.register_forward_pre_hook(lambda module, args: seen.append("hook"))
    host = HOSTS[name](layer)

    def run(args: tuple, kwargs: dict) -> Any:
        seen.append("run")
        return layer.forward(*args)

    host.around(lambda args, kwargs: host.call(run, args, kwargs), (torch.randn(2, 4),), {})
    assert seen == (["run"] if name in ("none", "device_map") else ["hook", "run"])
    seen.clear()
    host.call(run, (torch.randn(2, 4),), {})
    assert seen == (["hook", "run"] if host.gathers_for_loss else ["run"])


@hosts
def test_others_hooks(name):
    layer = nn.Linear(4, 4)
    host = HOSTS[name](layer)
    assert not host.has_other_hooks()
    layer.register_forward_hook(lambda module, args, output: None)
    assert host.has_other_hooks() == host.gathers_for_loss, "it matters where the hooks run around a loss"


@hosts
def test_the_dtype_of_a_product(name):
    host = HOSTS[name](nn.Linear(4, 4))
    expected = torch.bfloat16 if name == "FSDP2's head" else torch.float32
    assert host.product_dtype(torch.randn(2, 4, dtype=torch.bfloat16)) == expected


@pytest.mark.parametrize("marked", [True, False])
def test_release_undoes_the_mark_of_zero3(marked):
    layer = nn.Linear(4, 4)
    setattr(layer, LEAF, True)
    Zero3Layer(layer, (), marked).release()
    assert hasattr(layer, LEAF) != marked


def test_what_is_refused_is_said():
    layer = nn.Linear(4, 4)
    assert DeviceMapLayer(layer, (), "a reason").refused == FsdpHead(layer, None, "a reason").refused == "a reason"
