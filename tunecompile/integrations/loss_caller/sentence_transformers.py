"""sentence-transformers: who reads what a model returns for each token, and who calls a model by its `forward`."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType

from torch import nn

__all__ = ["PACKAGE", "called_by_forward", "pools_real_tokens"]

PACKAGE = "sentence_transformers."
#: classes behind a model that read tokens under the mask alone, all modes of them, and classes that read what they give
_POOLINGS, _BEHIND = ("Pooling",), ("Normalize", "Dense", "Dropout", "LayerNorm")


def called_by_forward(module: nn.Module) -> nn.Module | None:
    """Return the model whose `forward` a module calls, past the model's hooks and slot; None of other modules."""
    calls = type(module).__module__.startswith(PACKAGE) and hasattr(module, "modality_config")  # since 5.4
    model = getattr(module, "model", None) if calls else None
    return model if isinstance(model, nn.Module) else None


def pools_real_tokens(frames: Iterator[FrameType]) -> nn.Module | None:
    """Return the model under way if what it gives for padding is not read: its tokens are pooled under their mask.

    The chain of modules is sentence-transformers' own, and one of its losses has called it. None where
    that is not known.

    Args:
        frames: functions under way, outwards from one in this package.
    """
    inner = chain = None
    for frame in frames:
        home, module = str(frame.f_globals.get("__name__", "")), frame.f_locals.get("self")
        if chain is not None and home.startswith(PACKAGE) and ".losses." in home:
            return getattr(inner, "model", None) if _is_pooled(inner, chain) else None
        if frame.f_code.co_name == "forward" and isinstance(module, nn.Module) and home.startswith(PACKAGE):
            if isinstance(module, nn.Sequential):
                chain = module
            else:
                inner = module
        elif not home.startswith((PACKAGE, "torch.", "tunecompile.", "accelerate.", "contextlib", "transformers.")):
            return None
    return None


def _is_pooled(inner: nn.Module | None, chain: nn.Sequential) -> bool:
    """Whether a pooling stands behind a module in a chain, and only what reads that stands behind the pooling."""
    modules = [*chain.children()]
    if inner is None or not any(module is inner for module in modules):
        return False
    behind = modules[next(at for at, module in enumerate(modules) if module is inner) + 1 :]
    kinds = [_POOLINGS, *[_BEHIND] * (len(behind) - 1)]
    plain = all(
        type(module).__module__.startswith(PACKAGE)
        and type(module).__name__ in names
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
        and getattr(module, "module_input_name", "sentence_embedding") == "sentence_embedding"
        for module, names in zip(behind, kinds)
    )
    return bool(behind) and plain
