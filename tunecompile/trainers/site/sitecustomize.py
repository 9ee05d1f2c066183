"""Python runs this file at its start where `tunecompile run` has put its folder first on the path.

It imports nothing but the standard library: most processes of a run (workers, compilers) train nothing. Where one of
them imports transformers' Trainer, the Trainer's default callbacks get one more. Another `sitecustomize` that would
have run without this one runs all the same.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
HOST = "transformers.trainer"


class Watch:
    """A finder that adds the callback behind the import of the Trainer."""

    def find_spec(self, name, path=None, target=None):
        """The module's own spec, with a loader that does so."""
        if name != HOST:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader)
        return spec


class Loader:
    """The module's own loader, and then the callback."""

    def __init__(self, own):
        self.own = own

    def __getattr__(self, name):
        return getattr(self.own, name)

    def create_module(self, spec):
        """As its own loader does."""
        return self.own.create_module(spec)

    def exec_module(self, module):
        """As its own loader does; then the callback is one of the defaults."""
        self.own.exec_module(module)
        add_callback(module)


def add_callback(trainer):
    """Put the callback among those that every Trainer gets."""
    from tunecompile.trainers.huggingface import from_environment

    trainer.DEFAULT_CALLBACKS.append(from_environment())


def run_other():
    """Run the `sitecustomize` that this one stands before."""
    rest = [path for path in sys.path if path != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    run_other()
    sys.meta_path.insert(0, Watch())
