"""The repeated layers of a model, found by its structure: no class is known by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations


@dataclass(frozen=True)
class LayerStack:
    """The outermost list of repeated layers. Its owner runs once a step; each member is a region."""

    path: str
    owner: nn.Module
    members: tuple[nn.Module, ...]


def find_layers(model: nn.Module) -> list[LayerStack]:
    """The outermost `nn.ModuleList`s (or Sequentials) of at least two layers that hold modules.

    A Sequential must be of one class. In a ModuleList at least one class repeats: others may stand between (layers with
    cross-attention). A ModuleDict whose names are numbers is a list, too (torchtitan's layers). Lists inside a found
    layer (experts) are not regions. Lists of bare linears (several heads) are not layers. Lists in a list (pairs of
    attention and MLP, stages) have no call of their own: their members are layers of the outer one's owner.
    """
    found: list[LayerStack] = []

    def visit(module: nn.Module, path: str, runner: nn.Module) -> None:
        if type(module).forward is not nn.Module.forward:
            runner = module  # a container without a forward (a ModuleDict, say) never runs: its parent calls the layers
        for name, child in module.named_children():
            where = f"{path}.{name}" if path else name
            members = tuple(_members(child))
            classes = len({type(m) for m in members})
            repeated = (
                classes < len(members)
                if _is_list(child)
                else isinstance(child, nn.Sequential) and classes == 1 < len(members)
            )
            if repeated and all(next(m.children(), None) is not None for m in members):
                found.append(LayerStack(where, runner if _is_list(child) else child, members))
            else:
                visit(child, where, runner)

    visit(model, "", model)
    return found


def _members(container: nn.Module) -> Iterator[nn.Module]:
    """Of lists in it, which nobody calls, those that hold modules: norms between them are none."""
    for each in container.children():
        if _is_list(each):
            yield from (inner for inner in _members(each) if next(inner.children(), None) is not None)
        else:
            yield each


def _is_list(module: nn.Module) -> bool:
    """Whether its owner calls its members."""
    return isinstance(module, nn.ModuleList) or (isinstance(module, nn.ModuleDict) and all(map(str.isdigit, module)))


def find_norms(owner: nn.Module) -> list[nn.Module]:
    """Norms of hidden states outside the owner's layers: leaf modules whose parameters are vectors."""
    leaves = [child for child in owner.children() if next(child.children(), None) is None]
    return [
        leaf
        for leaf in leaves
        if (held := list(leaf.parameters(recurse=False))) and all(parameter.dim() == 1 for parameter in held)
    ]


def structure(module: nn.Module) -> tuple:
    """The key of a region: names and classes of all submodules. Layers with equal keys share compiled code.

    A parametrised module has a class of its own, and its parametrisations stand among its submodules.
    """
    return tuple((name, type_before_parametrizations(child)) for name, child in module.named_modules())
