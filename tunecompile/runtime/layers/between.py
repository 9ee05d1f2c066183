"""Calls of layers whose stack is replayed at once (`cuda_graphs.stacks`).

A layer that is replayed with others returns a tensor without values, which the next layer knows. Whoever else reads it
gets what the layers before give, run one by one; and so does a layer whose code is not the one that was replayed.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tunecompile.runtime.cuda_graphs.between import Between, Form
from tunecompile.runtime.cuda_graphs.stack_pass import Replayed
from tunecompile.runtime.cuda_graphs.stacks import Stacks
from tunecompile.runtime.unpad.masks.given import hidden_in


class Given:
    """The arguments of the layer that began a stack. The others are given the same, but for hidden states.

    Args:
        args, kwargs: of the layer.
        passed: what its compiled code was given for them.
        form: how it ran.
    """

    def __init__(self, args: tuple, kwargs: dict, passed: tuple[tuple, dict], form: Form):
        self.args, self.kwargs, self.passed, self.form = args, kwargs, passed, form
        self.hidden = hidden_in(args, kwargs)
        values = (*args, *kwargs.values())
        #: a layer may write to mappings and lists
        self.plain = self.hidden is not None and not any(isinstance(v, (dict, UserDict, list)) for v in values)

    def passed_with(self, args: tuple, kwargs: dict, between: Tensor) -> tuple[tuple, dict] | None:
        """What another layer's code is given for its arguments; None where they are not the same.

        between: in place of the hidden states that the layers before it give.
        """
        if not self.plain or len(args) != len(self.args) or kwargs.keys() != self.kwargs.keys():
            return None
        positions = [self._is_given(*both, between) for both in zip(args, self.args)]
        names = {name: self._is_given(value, self.kwargs[name], between) for name, value in kwargs.items()}
        if False in positions or False in names.values():
            return None
        given, named = self.passed
        return (
            tuple(between if is_hidden is None else value for value, is_hidden in zip(given, positions)),
            {name: between if names.get(name, True) is None else value for name, value in named.items()},
        )

    def _is_given(self, value: Any, other: Any, between: Tensor) -> bool | None:
        """Whether both are the same; None where it is the result of the layers before that was not written."""
        if isinstance(value, Between):
            return None if value.passed(self.form.rows, value.under_way) is between else False
        if isinstance(value, (bool, int, float, str)):
            return type(value) is type(other) and value == other
        return value is other


def stand_in(output: Any, stacks: Stacks | None, form: Form, *given: Any) -> Any:
    """A layer's output, where it is a part of a stack that was replayed; None where it is not.

    Args:
        output: of the layer.
        stacks: of the model.
        form: how the layer ran.
        given: its arguments, and what its code was given for them, as `Given` has them.
    """
    under_way = None if stacks is None else stacks.replayed
    if stacks is None or under_way is None:
        return None
    made = []

    def replaced(value: Any) -> Any:
        if value is not under_way.output:
            return value
        shape = (*form.batch, *value.shape[2:]) if form.batch else tuple(value.shape)
        made.append(Between(stacks, under_way, form, shape))
        return made[-1]

    left = pytree.tree_map(replaced, output)
    if made and under_way.given is None and given:
        under_way.given = Given(*given, form)
    return left if made else None


def passed_on(stacks: Stacks | None, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A layer's arguments on a batch as it comes, with what is passed in place of results that were not written.

    Mappings and lists stay the caller's own, unless they hold such a result.
    """
    if not any(map(_holds, args)) and not any(map(_holds, kwargs.values())):
        return args, kwargs
    under_way = None if stacks is None else stacks.replayed
    return (
        tuple(_passed(value, under_way) for value in args),
        {name: _passed(value, under_way) for name, value in kwargs.items()},
    )


def _holds(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(isinstance(each, Between) for each in value)
    return isinstance(value, Between)


def _passed(value: Any, under_way: Replayed | None) -> Any:
    if isinstance(value, (tuple, list)) and _holds(value):
        return type(value)(each.real() if isinstance(each, Between) else each for each in value)
    if not isinstance(value, Between):
        return value
    passed = value.passed(None, under_way)
    return value.real() if passed is None else passed


def call_in_stack(
    stacks: Stacks, call: Callable[..., Any], layer: nn.Module, kept: Callable | None, args: tuple, kwargs: dict
) -> Any:
    """A layer's call, which may begin, continue or end a stack.

    Args:
        stacks: of the model.
        call: runs the layer's compiled code.
        layer: as it is in the model.
        kept: returns what the layer's modules hold; None where it may not be a part of a stack.
        args, kwargs: of the layer.
    """
    if not stacks.begin((*args, *kwargs.values())):
        return call(layer, *args, **kwargs)
    if stacks.ended is not None:
        args, kwargs = _left(stacks, args, kwargs)
    if kept is not None and stacks.replayed is None:
        return _watched(stacks, call, layer, kept, args, kwargs)
    if kept is not None and (output := go_on(stacks, call, layer, args, kwargs)) is not None:
        return output
    args, kwargs = _left(stacks, args, kwargs)
    return call(layer, *args, **kwargs)


def _left(stacks: Stacks, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    left = stacks.left([*args, *kwargs.values()])
    return tuple(left[: len(args)]), dict(zip(kwargs, left[len(args) :]))


def _watched(
    stacks: Stacks, call: Callable[..., Any], layer: nn.Module, kept: Callable, args: tuple, kwargs: dict
) -> Any:
    """A layer's call that may begin a stack, or is compared with its calls before: does it keep its result, or what it
    is given? Of a result that nobody keeps there are as many references as when its graph had returned it. (Inputs
    autograd keeps, too.)
    """
    hidden = hidden_in(args, kwargs)
    with stacks.joining([each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]):
        output = call(layer, *args, **kwargs)
    result = stacks.watcher.learnt
    if result is None:
        return output
    keeps = getrefcount(result) > stacks.watcher.references or any(
        value is hidden or value is result for value in kept()
    )
    places = [value is result for value in pytree.tree_leaves(output) if value is result or value is hidden]
    if keeps or places != [True]:
        stacks.watcher.refuse()
    return output


def go_on(stacks: Stacks, call: Callable[..., Any], layer: nn.Module, args: tuple, kwargs: dict) -> Any:
    """A layer's call in a stack that was replayed; None where its code is not the one that was."""
    try:  # nothing may be traced, and nothing run eagerly: hidden states have no values
        with stacks.joining(), torch.compiler.set_stance("fail_on_recompile"):
            return call(layer, *args, **kwargs)
    except Exception:  # a mistake of the caller's raises again
        return None
