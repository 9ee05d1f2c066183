"""Tensors that traced code stores, beside what it returns: Dynamo knows each object that it writes to."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tunecompile._torch.lookup import exist, lookup

_EFFECTS = "torch._dynamo.side_effects.SideEffects"
_VARIABLES = "torch._dynamo.variables.base"
_translator: Any = lookup("torch._dynamo.symbolic_convert.InstructionTranslator")
_tracker: Any = lookup(f"{_VARIABLES}.VariableTracker")
_tensor: Any = lookup("torch._dynamo.variables.tensor.TensorVariable")
_there_before = tuple(
    lookup(f"{_VARIABLES}.{name}", type(None)) for name in ("ValueMutationExisting", "AttributeMutationExisting")
)
_TELLS = (
    exist("id_to_variable", "is_modified", "store_attr_mutations", under=_EFFECTS)
    and exist("VariableTracker.visit", "ValueMutationExisting", "AttributeMutationExisting", under=_VARIABLES)
    and exist("torch._dynamo.symbolic_convert.InstructionTranslator.current_tx")
)


def stores_tensors(own: Collection[int] = ()) -> bool:
    """Inside a backend: whether the traced code puts tensors into objects that were there before.

    Args:
        own: ids of containers that it may write to.

    Returns:
        Whether it does so anywhere else: in attributes, lists, variables of closures. Yes, where torch does not tell.
    """
    if not _TELLS:
        return True
    effects = _translator.current_tx().output.side_effects
    for number, variable in effects.id_to_variable.items():
        if number in own or not isinstance(variable.mutation_type, _there_before) or not effects.is_modified(variable):
            continue
        found: list[Any] = []
        _tracker.visit(found.append, [variable, *effects.store_attr_mutations.get(variable, {}).values()])
        if any(isinstance(each, _tensor) for each in found):
            return True
    return False
