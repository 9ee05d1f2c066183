"""Hybrids whose attention is written out are estimated like the same models that call one function for it."""

import pytest
import torch

import tunecompile
import tunecompile.integrations.kernel_functions as kernel_functions
import tunecompile.runtime.parts.kernel_functions as parts
from tests.support.models import hybrids
from tests.support.models.pairs import of_plain_layers
from tunecompile.notes import note

pytest.importorskip("transformers")
SHAPE = (2, 512)
WIDE = {"attention_head_dim": 320}  #: no flash attention takes such heads: a template of ours does


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, gpu, changes",
    [
        ("jamba", None, {}),
        ("jamba", "h100", {}),
        ("zamba", "h100", WIDE),
        ("zamba2", None, {}),
        ("zamba2", "h100", {}),
    ],
)
def test_written_out_attention_counts_as_much(family, gpu, changes):
    """Its operations were counted of no more than a key a query on a CPU, and not at all in a template: half of these steps."""
    if not hybrids.is_there(family):
        pytest.skip("not in this transformers")
    if gpu is not None:
        pytest.importorskip("triton")
    called, written = (
        tunecompile.estimate(
            hybrids.make(family, torch.bfloat16, attn_implementation=way, max_position_embeddings=512, **changes),
            SHAPE,
            gpu=gpu,
        )
        for way in ("sdpa", "eager")
    )
    assert written.flops == called.flops
    assert written.activations < 1.2 * called.activations  # no scores are kept
    assert gpu is None or written.milliseconds == pytest.approx(called.milliseconds, rel=0.1)


@pytest.mark.parametrize("known", [True, False])
def test_a_rehearsal_says_which_functions_are_no_ops(known, monkeypatch):
    refused = None if known else note("kernel-function-unknown", "modeling.convolution")
    found = [kernel_functions.Substitution("modeling.convolution", refused)]
    monkeypatch.setattr(parts, "substitute", lambda kinds: found)
    said = tunecompile.estimate(of_plain_layers(), SHAPE).notes
    assert [each for each in said if each.code == "kernel-function-unknown"] == ([] if known else [refused])
