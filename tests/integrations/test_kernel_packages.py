"""Kernels of other packages are called from compiled code as ops, and taken where they are right and faster."""

import dataclasses
import sys
import types

import pytest
import torch

from tests.support.ops.recurrent import operands, selective_operands
from tunecompile._torch import known_bugs
from tunecompile.integrations.kernel_functions import packages
from tunecompile.ir.eager_call import outputs, run_provider
from tunecompile.ops import channel_delta_rule, gated_delta_rule, selective_scan
from tunecompile.passes.plan import rivals


def rule(op):
    """fla's function, by the op."""

    @torch.compiler.disable
    def chunk(q, k, v, g, beta, scale, output_final_state, use_qk_l2norm_in_kernel):
        assert output_final_state and q.shape[2] == v.shape[2]
        return op(q, k, v, g, beta, None, None, scale, 1e-6 * use_qk_l2norm_in_kernel)

    return chunk


def scan(x, dt, a, b, c, return_last_state):
    """mamba_ssm's function."""
    made, final = selective_scan(*(each.transpose(1, 2) for each in (x, dt)), a, b.mT, c.mT, None, None)
    return made.mT, final


@pytest.fixture
def stand_ins(monkeypatch):
    functions = {
        "gated_delta_rule": rule(gated_delta_rule),
        "channel_delta_rule": rule(channel_delta_rule),
        "selective_scan": scan,
    }
    for name, rival in packages.RIVALS.items():
        module = types.ModuleType(rival.module)
        setattr(module, rival.function, functions[name])
        parts = rival.module.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        monkeypatch.setitem(sys.modules, rival.module, module)
    monkeypatch.setattr(packages, "_is_there", lambda package: True)


def call_of(op):
    torch.manual_seed(0)
    if op is selective_scan:
        return [*(x.detach() for x in selective_operands(1, 9, 3, 2)[:5]), None, None]
    made = operands(1, 9, 2, 2 if op is channel_delta_rule else 4, 4, 3, channels=op is channel_delta_rule)
    return [*(x.detach() for x in made[:5]), None, None, 0.3, 1e-6]


def provider_of(op):
    return next(provider for provider in op.providers if provider.name in packages.PACKAGES)


@pytest.mark.parametrize("op", [gated_delta_rule, channel_delta_rule, selective_scan], ids=lambda op: op.name)
def test_one_graph_with_values_and_gradients_of_the_op(op, stand_ins):
    args = call_of(op)
    made = torch.compile(provider_of(op).run, backend="eager", fullgraph=True)(*args)
    expected = op.reference(*args)
    torch.testing.assert_close(list(made), [x if x.dtype == y.dtype else x.to(y.dtype) for x, y in zip(expected, made)])
    grads = [torch.randn_like(x) for x in expected]
    found = run_provider(provider_of(op.backward_op).run, [*grads, *args], (True,) * 6)
    right = outputs(op.backward_op.reference(*grads, *args))
    for x, y in zip(found[:5], right):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_who_refuses(stand_ins, monkeypatch):
    args = call_of(gated_delta_rule)
    refuses = provider_of(gated_delta_rule).refuses
    assert refuses(*args).code == "not-on-gpu"
    with monkeypatch.context() as patch:
        patch.setattr(packages, "_is_there", lambda package: False)
        assert refuses(*args).code == "package-not-installed"
    monkeypatch.setattr(packages, "refuse_gpu", lambda *_: None)
    monkeypatch.setattr(packages, "compiled_for", lambda device: (9, 0))
    monkeypatch.setattr(known_bugs, "installed", lambda package: known_bugs.TorchVersion("3.6.0"))
    assert refuses(*args).code == "compiler-fails"
    monkeypatch.setattr(known_bugs, "installed", lambda package: known_bugs.TorchVersion("3.7.1"))
    assert refuses(*args) is None
    args[6] = torch.tensor([0, 4, 9])
    assert refuses(*args).code == "state-or-documents"
    assert refuses(*args[:6], None, 0.3, 1e-5).code == "arguments-not-supported"


@pytest.mark.parametrize(("right", "theirs", "chosen"), [(True, 1.0, "fla"), (True, 2.0, None), (False, 1.0, None)])
def test_the_faster_one_that_is_right(right, theirs, chosen, stand_ins, monkeypatch):
    takes_all = [dataclasses.replace(provider, refuses=lambda *_: None) for provider in gated_delta_rule.providers]
    monkeypatch.setattr(gated_delta_rule, "providers", takes_all)
    monkeypatch.setattr(rivals, "_found", {})
    monkeypatch.setattr(rivals.tuning_cache, "read", lambda *_: None)
    monkeypatch.setattr(rivals.tuning_cache, "keep", lambda kind, key, value, sound: value)
    times, timed = {"fla": theirs, "triton": 1.5}, []

    def time(provider, args):
        timed.append(args[0].shape[1])
        return times[provider.name] if args[0].shape[1] == 9 else 1.0

    call = call_of(gated_delta_rule)
    for _ in range(2):  # the second finds what the first measured
        found = rivals.prefer(gated_delta_rule, call, lambda *_: right, time)
        assert (found and found.name) == chosen
    assert timed == [9, 9] * right and (len(gated_delta_rule.providers) == 2) == right
    longer = [torch.cat([x, x], 1) for x in call[:5]] + call[5:]
    assert rivals.prefer(gated_delta_rule, longer, lambda *_: right, time) is None  # other sizes, another choice
    assert timed == [9, 9, 18, 18] * right
