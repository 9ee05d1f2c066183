"""The trial of a template before a model runs it: right ones pass, and a planted fault is seen."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
from tunecompile.ir.eager_call import outputs  # noqa: E402
from tunecompile.ir.example import Draw, arguments_of  # noqa: E402
from tunecompile.ir.op import OPS  # noqa: E402
from tunecompile.passes.plan import probe  # noqa: E402

TEMPLATES = {
    op.name: (op, provider)
    for op in OPS.values()
    for provider in op.providers
    if provider.name in probe.BY_TEMPLATE and (op.owner or op).example
}
#: bf16 products, which the interpreter has not
HALF_ALONE = tuple(
    f"{rule}{end}" for rule in ("gated_delta_rule", "channel_delta_rule", "ssd_scan") for end in ("", "_backward")
)


def tried(name, device, change=None):
    op, provider = TEMPLATES[name]
    arguments = arguments_of(op, Draw(device, torch.float16))
    reference, exact = (outputs(op.reference(*given)) for given in (arguments, probe.wide(arguments)))
    if change is not None:
        run = provider.run
        provider = dataclasses.replace(provider, run=lambda *args, used: change(run(*args, used=used)))
    return probe.compare(provider, arguments, reference, exact, torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in HALF_ALONE])
def test_templates_pass_their_trial(name, device):
    assert tried(name, device) == ""


def test_a_wrong_gradient_is_seen(device):
    def lose(made):
        return [made[0], made[1] * 1.1]

    assert "output 1 is 1.0e-01 from fp64" in tried("rms_norm_backward", device, lose)
