"""Calls of layers whose stack is replayed at once, and what stands between them (`cuda_graphs.stacks`).

A layer that is replayed with others returns a tensor without values, which the next layer knows. Whoever else reads it
gets what the layers before give, run one by one; and so does a layer whose code is not the one that was replayed.
"""

from __future__ import annotations

import weakref
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tunecompile._torch.autograd import plain_tensors
from tunecompile.runtime.cuda_graphs.chain import itself
from tunecompile.runtime.cuda_graphs.stack_pass import Replayed
from tunecompile.runtime.cuda_graphs.stacks import Stacks
from tunecompile.runtime.layers.late_tensor import LateTensor
from tunecompile.runtime.layers.module_watch import not_on_modules
from tunecompile.runtime.unpad.masks.given import hidden_in

__all__ = ["Between", "Form", "call_in_stack", "go_on", "passed_on", "stand_in"]


@dataclass(frozen=True)
class Form:
    """How a layer runs on its batch: on a row of it, or as it comes."""

    rows: Any = None  #: what layers on the same row share
    leave: Callable[[Tensor], Tensor] = itself  #: gives the batch of a row: [1, N, H] -> [B, T, H]
    batch: tuple = ()  #: rows and length, where it runs on a row


class Between(LateTensor):
    """A layer's result that was not written. It is made when somebody reads it.

    Args:
        stacks: of the model.
        under_way: the pass that was replayed.
        form: how layers run on their batch.
        shape: of the batch.
    """

    shown = LateTensor.shown | {Tensor.requires_grad.__get__}

    @staticmethod
    def __new__(cls, stacks: Stacks, under_way: Replayed, form: Form, shape: tuple[int, ...]) -> Between:
        output = under_way.output
        assert output is not None
        return Tensor._make_wrapper_subclass(
            cls, shape, dtype=output.dtype, device=output.device, requires_grad=output.requires_grad
        )

    def __init__(self, stacks: Stacks, under_way: Replayed, form: Form, shape: tuple[int, ...]):
        calls = self.calls = under_way.done
        super().__init__(shape, self.dtype, self.device, lambda: stacks.result(under_way, calls, form.leave))
        self.under_way, self.rows = under_way, form.rows
        under_way.late.append(weakref.ref(self))
        with plain_tensors():  # `Function.apply` takes it as it is
            not_on_modules(self.register_post_accumulate_grad_hook, _pass_back)

    def passed(self, rows: Any, under_way: Replayed | None) -> Tensor | None:
        """What the next layer is given in its place; None once somebody read it, for a layer of another pass, and for
        one behind the next.

        Args:
            rows: that the layer runs on.
            under_way: the pass that is under way among its layers.
        """
        if self.make is None or rows is not self.rows or under_way is not self.under_way:
            return None
        return self.under_way.output if self.under_way.done == self.calls else None


def _pass_back(between: Tensor) -> None:
    """A gradient has reached a result that was not written: on to what the layers give."""
    with plain_tensors():
        gradient, between.grad = between.grad, None
    assert isinstance(between, Between)
    torch.autograd.backward(between.real(), gradient, retain_graph=True)  # the loss may go through it, too


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
    result = stacks.learnt
    if result is None:
        return output
    keeps = getrefcount(result) > stacks.references or any(value is hidden or value is result for value in kept())
    places = [value is result for value in pytree.tree_leaves(output) if value is result or value is hidden]
    if keeps or places != [True]:
        stacks.refuse()
    return output


def go_on(stacks: Stacks, call: Callable[..., Any], layer: nn.Module, args: tuple, kwargs: dict) -> Any:
    """A layer's call in a stack that was replayed; None where its code is not the one that was."""
    try:  # nothing may be traced, and nothing run eagerly: hidden states have no values
        with stacks.joining(), torch.compiler.set_stance("fail_on_recompile"):
            return call(layer, *args, **kwargs)
    except Exception:  # a mistake of the caller's raises again
        return None
