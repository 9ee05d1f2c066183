"""What torch does for its own statistics after each compilation, and a suite of thousands of small ones can do without."""

from torch._dynamo import guards


def without_profiles() -> None:
    """Guards are not timed, for which torch clears the processor's caches: 25 ms for each compiled frame."""
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0
