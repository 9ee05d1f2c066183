"""sentence-transformers: who reads what a model returns for each token, and who calls a model by its `forward`."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType

from torch import nn

__all__ = ["PACKAGE", "called_by_forward", "pools_real_tokens"]

PACKAGE = "sentence_transformers."
#: classes right behind a model that read real tokens alone, in all modes of theirs, and how the class of a model has to
#: end that has a head: one that makes each token's logits of its hidden state
_READERS = {"Pooling": "", "SpladePooling": "ForMaskedLM", "LogitScore": "ForCausalLM"}
#: classes behind these, and what they read
_BEHIND, _POOLED = ("Normalize", "Dense", "Dropout", "LayerNorm"), "sentence_embedding"
#: of transformers: the head of a class reads the last token of each row
_READS_LAST = "GenericForSequenceClassification"


def called_by_forward(module: nn.Module) -> nn.Module | None:
    """Return the model whose `forward` a module calls, past the model's hooks and slot; None of other modules."""
    calls = type(module).__module__.startswith(PACKAGE) and hasattr(module, "modality_config")  # since 5.4
    model = getattr(module, "model", None) if calls else None
    return model if isinstance(model, nn.Module) else None


def pools_real_tokens(frames: Iterator[FrameType]) -> nn.Module | None:
    """Return the model under way if what it gives for padding is not read: its tokens are pooled under their mask, or
    the last one of each row alone is scored.

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
    """Whether what stands behind a module in a chain reads real tokens alone, its model's own head each by itself."""
    modules = [*chain.children()]
    at = next((at for at, module in enumerate(modules) if module is inner), None)
    if at is None:
        return False
    model, behind = type(getattr(inner, "model", None)), modules[at + 1 :]
    if not behind:
        return any(kind.__name__ == _READS_LAST and _is_of(kind, "transformers.") for kind in model.__mro__)
    head = _READERS.get(type(behind[0]).__name__)
    if head is None or (head and not (_is_of(model, "transformers.") and model.__name__.endswith(head))):
        return False
    return all(
        _is_of(type(module), PACKAGE)
        and (module is behind[0] or type(module).__name__ in _BEHIND)
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
        and getattr(module, "module_input_name", _POOLED) in (_POOLED, "causal_logits")
        for module in behind
    )


def _is_of(kind: type, package: str) -> bool:
    return kind.__module__.startswith(package)
