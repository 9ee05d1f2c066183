"""Made-up runs of `tunecompile compare`."""

from __future__ import annotations


def run(system, ms, first, **more):
    return {
        "system": system,
        "model": "m",
        "mode": "qlora",
        "shape": "4x64",
        "status": "ok",
        "order": 0,
        "tokens_per_s": 1e5 / ms,
        "step_ms": {"median": ms, "min": ms * 0.9, "max": ms * 1.2},
        "first_step_s": first,
        "peak_gib": 1.5,
        "peak_reserved_gib": None,
        "saved_bytes": 2**20,
        "losses": [3.0, 2.5, 2.25],
        "held_out_before": 3.1,
        "held_out_after": 2.2,
        **more,
    }
