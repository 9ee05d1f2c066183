"""A pass that is wrong, for those who have to find it."""

from __future__ import annotations

import torch

import tunecompile.passes
from tunecompile.compiler.pass_manager import recognize
from tunecompile.ir.rewrite import rewrite


def planted_passes(factor):
    """A family of two rewrites, of which the second loses `factor`."""

    @rewrite("harmless", to=lambda x: torch.rsqrt(x))
    def harmless(x):
        return torch.rsqrt(x)

    @rewrite("wrong", to=lambda x: torch.nn.functional.silu(x) * factor)
    def wrong(x):
        return torch.nn.functional.silu(x)

    short = [
        p for p in tunecompile.passes.PIPELINE if p.stage != "recognize" or p.name in ("rms_norm", "swiglu")
    ]  # few trials
    return [recognize("planted", [harmless, wrong], lambda graph: []), *short]
