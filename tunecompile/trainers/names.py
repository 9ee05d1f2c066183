"""What `tunecompile run` and the processes it starts both know."""

__all__ = ["RUN", "SITE"]

#: the variable with a JSON: `options` of `optimize`, and `told`, a file to which each process writes what it optimizes
RUN = "TUNECOMPILE_RUN"
SITE = "site"  #: the folder, beside this file, that is put first on Python's path
