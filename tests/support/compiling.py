"""What torch does for its own statistics, and a suite of thousands of small compilations can do without."""

import logging
import os

from torch._dynamo import guards


def without_profiles() -> None:
    """Guards are not timed, for which torch clears the processor's caches: 25 ms for each compiled frame."""
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0


def without_traces() -> None:
    """pytest 9.2 listens to all that propagates no further, so torch writes its structured trace: each graph as text, for nobody."""
    if "TORCH_TRACE" not in os.environ:
        log = logging.getLogger("torch.__trace")
        log.propagate = True
        for handler in log.handlers[:]:
            log.removeHandler(handler)
