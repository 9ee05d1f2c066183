"""The report says why each provider was taken, and why the others were not."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import tunecompile
from tests.support import zoo
from tunecompile.ir.op import OPS, refuse_spills
from tunecompile.notes import note
from tunecompile.ops import gated_activation, lora_linear, rms_norm, varlen_attention

REFUSED = "few_rows: not on a GPU; k_extension: not on a GPU; bitsandbytes: its weights are not in 4 bits"


def test_every_provider_says_what_it_gains():
    silent = [
        f"{op.name}: {provider.name}"
        for op in OPS.values()
        if op.name != "soft_cap"
        for provider in op.providers
        if not provider.because
    ]
    assert not [name for name in silent if "test" not in name], silent


def test_on_a_cpu_the_report_names_who_refused():
    model = tunecompile.optimize(zoo.adapt(zoo.make("llama", num_hidden_layers=2)), executor="eager")
    zoo.step(model, zoo.batch())
    report = tunecompile.report(model)
    (region,) = [r for r in report.regions if "lora_linear: reference" in r.providers]
    assert region.reasons["lora_linear: reference"] == [REFUSED]
    assert region.reasons["rope: reference"] == []  # no other provider is registered
    assert f"lora_linear: reference\n          {REFUSED}\n" in str(report)
    assert report.to_dict()["regions"][0]["reasons"]["rms_norm_backward: reference"] == ["triton: not on a GPU"]


def fake(*shape, dtype=torch.bfloat16, device="cuda"):
    return torch.empty(shape, dtype=dtype, device=device)


def test_refusals_on_a_gpu():
    """Asked of fake GPU tensors, which needs none."""
    pytest.importorskip("triton")
    with FakeTensorMode():
        wide, narrow, single = fake(4, 2048), fake(4, 576), fake(4, 2048, dtype=torch.float32)
        weight = fake(2048)
        norm, gated = rms_norm.backward_op, gated_activation.backward_op
        assert norm.choose((wide, wide, weight, 1e-5, 0.0, True)).name == "triton"
        assert norm.refusals((narrow, narrow, weight, 1e-5, 0.0, True), None) == {
            "triton": note("rows-too-short", length=576, limit=1024)
        }
        assert norm.refusals((single, single, weight, 1e-5, 0.0, True), None) == {
            "triton": note("not-half-precision", detail="float32")
        }
        assert (
            norm.refusals((wide, fake(2048, 4).t(), weight, 1e-5, 0.0, True), None)["triton"].code
            == "row-not-contiguous"
        )
        assert gated.refusals((wide, wide, wide, "silu"), None) == {}
        assert gated.refusals((wide, wide, wide, "gelu"), None) == {
            "triton": note("activation-not-supported", detail="gelu")
        }
        assert (
            lora_linear.choose((wide, [], [weight], [], [weight], [weight], [1.0], torch.float32, "dense")).name
            == "k_extension"
        )
        q, odd = fake(6, 4, 64), fake(6, 4, 20)
        offsets = fake(3, dtype=torch.int32)
        assert varlen_attention.refusals((odd, odd, odd, offsets, 4, 1.0, 0, None, True, 0.0), None) == {
            "flash": note("head-widths", queries=20, values=20)
        }
        assert (
            varlen_attention.refusals((q, q, q.half(), offsets, 4, 1.0, 0, None, True, 0.0), None)["flash"].code
            == "dtypes-differ"
        )


def test_ops_with_providers_have_no_defaults():
    """torch leaves an argument that equals its default out of a graph, and a provider would not be given it."""
    for op in (made for made in OPS.values() if made.providers):
        defaults = [p.name for p in inspect.signature(op.reference).parameters.values() if p.default is not p.empty]
        assert not defaults, op.name


@pytest.mark.parametrize(("hip", "warp", "refuses"), [("6.4", 32, True), ("6.4", 64, False), (None, 32, False)])
def test_kernels_that_would_spill_are_torchs(hip, warp, refuses, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(warp_size=warp))
    assert (refuse_spills(SimpleNamespace(is_cuda=True, device=torch.device("cuda"))) is not None) == refuses
    assert refuse_spills(torch.empty(2)) is None
