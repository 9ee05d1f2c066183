"""Python runs this file at its start where `tunecompile run` has put its folder first on the path.

It imports nothing but the standard library: most processes of a run (workers, compilers) train nothing. Where one of
them imports transformers' models, `tunecompile` becomes a name of attention and experts; where it imports the Trainer,
the Trainer's default callbacks get one more; where one makes an optimizer of torch's, the model of its parameters is
looked for. Another `sitecustomize` that would have run without this one runs all the same.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)


class Watch:
    """A finder that adds to the modules in `HOSTS` when they are imported."""

    def __init__(self):
        self.waiting = dict(HOSTS)

    def find_spec(self, name, path=None, target=None):
        """The module's own spec, with a loader that does so."""
        add = self.waiting.pop(name, None)
        if add is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader, add)
        return spec


class Loader:
    """The module's own loader, and then what is added."""

    def __init__(self, own, add):
        self.own, self.add = own, add

    def __getattr__(self, name):
        return getattr(self.own, name)

    def create_module(self, spec):
        """As its own loader does."""
        return self.own.create_module(spec)

    def exec_module(self, module):
        """As its own loader does; then it is added to."""
        self.own.exec_module(module)
        self.add(module)


def add_names(models):
    """Take `tunecompile` as the name of an implementation of attention and of experts."""
    with contextlib.suppress(Exception):  # a transformers without such names says itself that it does not know one
        from tunecompile.integrations.registered import register

        register()


def add_callback(trainer):
    """Put the callback among those that every Trainer gets."""
    from tunecompile.trainers.huggingface import from_environment

    trainer.DEFAULT_CALLBACKS.append(from_environment())


def add_kernel(kernels):
    """Put ours among LLaMA-Factory's kernels."""
    import tunecompile.trainers.llamafactory  # noqa: F401


def watch_optimizers(optim):
    """Look for the model of every optimizer, when it is made: before its first step, and before engines wrap both."""
    own = optim.Optimizer.__init__

    @functools.wraps(own)
    def made(self, *args, **kwargs):
        own(self, *args, **kwargs)
        from tunecompile.trainers.loops import optimizer_made

        optimizer_made(self)

    optim.Optimizer.__init__ = made


HOSTS = {
    "llamafactory.v1.plugins.model_plugins.kernels.interface": add_kernel,
    "transformers.modeling_utils": add_names,
    "transformers.trainer": add_callback,
    "torch.optim.optimizer": watch_optimizers,
}


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
