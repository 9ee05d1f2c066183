"""The step: how the call of a module that owns layers runs, decided once, and what its layers read of that."""
