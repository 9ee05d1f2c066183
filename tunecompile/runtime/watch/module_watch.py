"""Hooks, parameters and buffers inside a layer. Its modules are walked again only where one was added, removed or
replaced.

Adapters are added, merged and removed, and `torch.func.functional_call` swaps weights for the length of a call. Walking
a layer with adapters (83 modules) takes 0.1 ms; the checks made here at every step or call take a tenth of that.

A module's dictionary of hooks may be replaced whole (`module._forward_hooks = OrderedDict()` is a usual way to remove
hooks). To look four of them up in each module (1,333 in an 8B model with adapters) would take 0.15 ms a step, so they
are held weakly instead: a dictionary that is dropped says so. One that somebody keeps is found by a look at the
modules: where a hook was registered anywhere, and at every 32nd step. (While any hook is in place they are looked up.)
"""

from __future__ import annotations

import gc
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tunecompile._torch.modules import HOOKS
from tunecompile.integrations.loss_caller import home_of

_OF_MODULES = vars(nn.Module())  #: attributes that every module has
_RUNNING = (types.FrameType, types.GeneratorType)  #: code that is under way, by its variables
TURNS = 32  #: steps, in one of which the modules of a layer are looked at
_turns = itertools.count()


class _Registered:
    """Hooks of this process that somebody registered, anywhere: `RemovableHandle.next_id`, without ours."""

    ours = 0  #: on nodes of autograd, at every step


def hook_node(node: Any, hook: Callable) -> None:
    """Have a hook run before a node's backward. It is not taken for one on a module."""
    not_on_modules(node.register_prehook, hook)


def not_on_modules(register: Callable, hook: Callable) -> None:
    """Register a hook that is on no module."""
    before = RemovableHandle.next_id
    register(hook)
    _Registered.ours += RemovableHandle.next_id - before


def holders(value: Any, returned: Any) -> list[Any]:
    """Objects that hold a value beside what returned it: a list of the user's, or a cell that a closure reads.

    It looks at all objects of the process, which takes milliseconds.

    Args:
        value: a tensor.
        returned: it, or tuples, lists and dictionaries around it.
    """
    around, pending = set(), [returned]
    while pending:
        each = pending.pop()
        if isinstance(each, (tuple, list, dict)):
            around.add(id(each))
            pending += each.values() if isinstance(each, dict) else each
    return [each for each in gc.get_referrers(value) if id(each) not in around and not isinstance(each, _RUNNING)]


class ModuleSnapshot:
    """The dictionaries of a layer's modules, which are the modules' own and so always current. Those of a module that
    was removed are released, with its weights.
    """

    def __init__(self, layer: nn.Module):
        modules = list(layer.modules())
        self.own: list[dict] = [vars(part) for part in modules]
        self.weights: list[dict] = [part._parameters for part in modules]
        self.buffered: list[dict] = [part._buffers for part in modules]
        self.children: list[dict] = [part._modules for part in modules]
        self.seen = [{name: self._known(child) for name, child in children.items()} for children in self.children]
        self.dropped = False  #: whether a dictionary of hooks is no longer in use
        self.late = False  #: whether one that was replaced was found only now, maybe some steps late
        self.turn = next(_turns)
        self.registered = RemovableHandle.next_id - _Registered.ours
        current, drop = self._current(), partial(_drop, weakref.ref(self))
        self.ids = list(map(id, current))
        self.held = [_held(hooks, drop) for hooks in current]

    def _current(self) -> list[dict]:
        """The dictionaries of hooks that the modules have now."""
        return [own[name] for own in self.own for name in HOOKS]

    @property
    def hooks(self) -> list[dict]:
        """The modules' dictionaries of hooks now, or an empty list where no module has a hook."""
        return self._current() if self.dropped or any(self.held) else []

    @property
    def hooked(self) -> set[int]:
        """Which of the modules have a hook, by their place among all."""
        hooks = self._current() if self.dropped else self.held
        return {at // len(HOOKS) for at in itertools.compress(itertools.count(), hooks)}

    def _known(self, child: nn.Module | None) -> Any:
        """A weak proxy that equals the child."""
        looked = (self.own, self.weights, self.buffered, self.children)
        return child if child is None else weakref.proxy(child, lambda _: [part.clear() for part in looked])

    @property
    def changed(self) -> bool:
        """Whether a module, or a dictionary of hooks, was added, removed or replaced since. (Compared in C.)"""
        if self.dropped or self.children != self.seen:
            return True
        self.turn += 1
        count = RemovableHandle.next_id - _Registered.ours
        registered, self.registered = count != self.registered, count
        if not registered and self.turn % TURNS:
            return False
        replaced = list(map(id, self._current())) != self.ids
        self.late = replaced and not registered
        return replaced

    @property
    def collected(self) -> bool:
        """Whether transformers 5.0 collects outputs of modules, by functions that replace their forwards during a call.
        Later versions use hooks.
        """
        return any("forward" in own and home_of(own["forward"]) == "transformers.utils.generic" for own in self.own)

    def kept(self) -> Iterator[Any]:
        """What attributes of the modules hold, and lists, tuples and dictionaries in them."""
        for value in (value for own in self.own for name, value in own.items() if name not in _OF_MODULES):
            yield value
            if isinstance(value, (list, tuple, dict)):
                yield from value.values() if isinstance(value, dict) else value

    def owns(self, weights: Sequence[Tensor]) -> bool:
        """Whether all of them are parameters of the layer now."""
        return {id(weight) for weight in weights} <= {
            id(parameter) for held in self.weights if held for parameter in held.values()
        }

    def buffers(self) -> list[Tensor]:
        """The layer's buffers now."""
        return [buffer for held in self.buffered if held for buffer in held.values() if buffer is not None]


_METHODS = (types.FunctionType, property, staticmethod, classmethod)


class ClassWatch:
    """The methods of the classes of some modules.

    Dynamo guards on the class of a module, and on few of the methods that it finds there: another `forward` of PEFT's
    linears was not noticed.
    """

    def __init__(self):
        self.classes: list[type] = []
        self.live: list[Mapping[str, Any]] = []  #: what stands in each of them
        self.known: list[dict[str, Any]] = []  #: what stood there
        self.states: list[dict] = []  #: their methods, whenever they differed
        self.version = 0  #: tells the present state from others

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Watch the classes of these modules, too. (`Step` looks at those of `nn.Module`.)"""
        for kind in set(map(type, modules)):
            for base in kind.__mro__:
                if base not in self.classes and base not in (object, nn.Module):
                    self.classes.append(base)
                    self.live.append(vars(base))
                    self.known.append(dict(vars(base)))

    def look(self) -> int:
        """The version, renewed. (Compared in C: 0.02 ms for the fourteen classes of an adapted layer.)"""
        if self.live != self.known:
            before = self._methods()
            self.known = list(map(dict, self.live))
            after = self._methods()
            if before != after:  # and not a number that a class counts
                self.states += [methods for methods in (before, after) if methods not in self.states]
                self.version = self.states.index(after)
        return self.version

    def _methods(self) -> dict[tuple[type, str], Any]:
        found = ((kind, name, value) for kind, own in zip(self.classes, self.known) for name, value in own.items())
        return {(kind, name): value for kind, name, value in found if isinstance(value, _METHODS)}


def _held(hooks: dict, drop: Callable[[Any], None]) -> Any:
    """A weak proxy, which is as true as the dictionary. (Only a plain `dict` has none.)"""
    try:
        return weakref.proxy(hooks, drop)
    except TypeError:
        return hooks


def _drop(known: weakref.ref[ModuleSnapshot], _: Any) -> None:
    """A dictionary of hooks is no longer in use."""
    if (snapshot := known()) is not None:
        snapshot.dropped = True
        snapshot.held.clear()
