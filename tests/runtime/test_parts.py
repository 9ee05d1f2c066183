"""What happens at the beginning of a step, one part at a time: caches, budgets, what is told. No model runs."""

import functools
import logging
import types

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.support.notes import logged
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.model_state import ModelCall
from tunecompile.runtime.parts import memory
from tunecompile.runtime.parts.checkpointing import Checkpointing
from tunecompile.runtime.parts.layers import EntryHook
from tunecompile.runtime.parts.memory import MemoryBudget, OomRecovery
from tunecompile.runtime.step.facts import read_facts
from tunecompile.runtime.step.mode import mode_of_step
from tunecompile.runtime.step.state import Step


class Owner(nn.Module):
    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None):
        return input_ids


class Plain(nn.Module):
    def forward(self, x):
        return x


class Began:
    """A state that notes what begins."""

    def __init__(self, memory=None, setting=None, checkpointed=False):
        self.step, self.seen, self.memory, self.checkpointed = Step(), [], memory, checkpointed
        self.settings, self.store, self.slots = types.SimpleNamespace(memory=setting), "store", []

    def follow(self, slots):
        self.seen.append("follow")

    def before_step(self, call):
        self.seen.append((call.args, call.kwargs, call.counts))


WORDS, PLACES = torch.ones(1, 4).long(), torch.arange(4)[None]


def test_a_training_step_makes_no_cache():
    """But where positions alone may say which tokens are of one sequence; and that holds for one step."""
    state, owner = Began(), Owner()
    hook = EntryHook(state, owner, (), counts=True)
    given = {"position_ids": PLACES}
    assert hook(owner, (WORDS,), given) is None and state.step.makes_cache
    assert hook(owner, (WORDS,), {}) == ((WORDS,), {"use_cache": False}) and not state.step.makes_cache
    assert hook(owner, (WORDS, PLACES), given) == ((WORDS, PLACES), {**given, "use_cache": False})
    assert state.seen[:2] == ["follow", ((WORDS,), given, True)] and len(state.seen) == 6
    for kwargs in (None, {"use_cache": True}, {"use_cache": False}, {"past_key_values": object()}):
        assert hook(owner, (WORDS,), kwargs) is None and not state.step.makes_cache
    assert hook(owner, (WORDS, PLACES, PLACES), {}) is None, "which may be a cache"
    assert EntryHook(state, plain := Plain(), (), counts=False)(plain, (WORDS,), {}) is None


def test_a_cache_that_the_model_would_make_is_remembered():
    state, owner = Began(), Owner()
    hook, owner.config = EntryHook(state, owner, (), counts=True), types.SimpleNamespace(use_cache=False)
    hook(owner, (WORDS,), {})
    owner.config.use_cache = True
    hook(owner, (WORDS,), {"use_cache": False})
    assert not state.step.drops_cache
    hook(owner, (WORDS,), {})
    owner.config.use_cache = False
    hook(owner, (WORDS,), {})
    assert state.step.drops_cache


def test_what_is_no_training_step_begins_nothing():
    class Budget:
        paused = 0

        def pause(self):
            self.paused += 1

    state, owner = Began(), Owner().eval()
    state.step.budgets = (Budget(),)
    hook = EntryHook(state, owner, (), counts=True)
    assert hook(owner, (WORDS,), {}) is None and state.seen == [] and state.step.budgets[0].paused == 1
    owner.train()
    with torch.no_grad():
        assert hook(owner, (WORDS,), {"use_cache": False}) is None
    assert state.seen == ["follow"] and state.step.scoring and state.step.budgets[0].paused == 1
    state.step.repeats = True  # the call is made once more, in the midst of a step
    assert hook(owner, (WORDS,), {}) == ((WORDS,), {"use_cache": False}) and state.seen == ["follow"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_which_forwards_are_training_steps(training, gradients):
    step, owner = Step(), Owner().train(training)
    fresh = (step.active, step.entered, step.batches, step.in_eval, step.outer, step.transformed)
    assert fresh == (False, False, 0, False, False, False)
    with torch.set_grad_enabled(gradients):
        step.enter(owner, mode_of_step(read_facts(owner, (), {})))
    assert step.active is (training and gradients) and step.in_eval is (gradients and not training)
    assert (step.entered, step.batches, step.outer, step.transformed) == (True, 1, False, False)
    torch.func.vmap(lambda x: step.enter(owner, mode_of_step(read_facts(owner, (), {}))) or x)(torch.ones(2))
    assert not step.active and step.transformed and step.batches == 2


class Counted:
    begun, agreement = 0, None

    def __init__(self):
        self.memory = types.SimpleNamespace(most=0)

    def begin(self):
        self.begun += 1


def test_budgets_are_made_once_and_begin_each_step(monkeypatch):
    made = [Counted(), Counted()]
    monkeypatch.setattr(memory, "make_budgets", lambda state: made)
    state = Began(memory="2GiB", setting="2GiB")
    state.step.recovery = recovery = Counted()
    for _ in range(2):
        MemoryBudget().before_step(state, None)
    assert state.step.budgets is made and [each.begun for each in (*made, recovery)] == [2, 2, 2]
    assert recovery.agreement is not None


@pytest.mark.parametrize("setting", [None, "auto"])
def test_where_nobody_plans_no_budget_is_made(monkeypatch, setting):
    """Without a setting nobody asks; where none can plan, nobody asks again."""
    asked = []
    monkeypatch.setattr(memory, "make_budgets", lambda state: asked.append(1) or ())
    state = Began(memory=setting, setting=setting)
    for _ in range(2):
        MemoryBudget().before_step(state, None)
    assert len(asked) == (setting is not None) and state.memory is None and state.step.budgets == ()


def test_checkpoints_of_all_layers_are_a_budget(monkeypatch):
    """As long as they are there."""
    wanted, made = [False], [Counted()]
    monkeypatch.setattr(memory, "_is_checkpointed", lambda state: wanted[0])
    monkeypatch.setattr(memory, "make_budgets", lambda state: made)
    state, told = Began(), []
    call = ModelCall((torch.ones(2, 5).long(),), {})
    monkeypatch.setattr(memory, "largest_batch", lambda rows: 100 * rows)
    for wanted[0] in (False, True, True, False):
        MemoryBudget().before_step(state, call)
        told.append((state.checkpointed, state.memory, list(state.step.budgets)))
    assert told == [(False, None, []), *[(True, "auto", made)] * 2, (False, None, [])] and made[0].begun == 2
    assert made[0].memory.most == 200, "tokens of the largest batch that the trainer may bring"
    wanted[0] = True
    given = Began(memory="2GiB", setting="2GiB")
    MemoryBudget().before_step(given, None)
    assert (given.checkpointed, given.memory) == (False, "2GiB"), "who sets a budget has that one"


def test_memory_that_runs_out_without_a_budget_is_told_once(caplog):
    def full():
        raise torch.OutOfMemoryError("all of it")

    step, planned = Step(), Step(recovery=Counted())
    with caplog.at_level(logging.WARNING, "tunecompile"):
        for each in (planned, step, step):
            with pytest.raises(torch.OutOfMemoryError, match="all of it"):
                each.telling(full)
            assert logged(caplog.records) == ([] if each is planned else ["no-budget"])
    assert step.telling(lambda: 3) == 3 and not planned.full


@pytest.mark.parametrize("setting, recovers", [(None, False), ("2GiB", True)])
def test_steps_are_repeated_where_there_is_a_budget(setting, recovers):
    """Else an error is torch's own."""
    state = Began(memory=setting, setting=setting)
    OomRecovery().attach(state)
    assert (state.step.recovery is not None) is recovers


# -- checkpoints of the user's --------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.gradient_checkpointing, self._gradient_checkpointing_func = True, function


def with_more(function, *args):
    """It does more than checkpoint: it moves what is saved to the host, say."""
    return function(*args)


def checkpointed(*layers, **options):
    state = Began(**options)
    state.stacks, state.slots = [layers], [types.SimpleNamespace(layer=layer, owner=None) for layer in layers]
    made = Checkpointing()
    made.follow(state, state.slots)
    return state, made


def test_checkpoints_of_layers_are_followed_and_put_back():
    plain = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
    layers = Layer(plain), Layer(with_more), nn.Linear(1, 1)
    state, made = checkpointed(*layers)
    assert [slot.checkpoint for slot in state.slots] == [True, False, False]
    assert [slot.checkpointed_by for slot in state.slots] == [None, with_more, None]
    assert [note.code for note in made.notes(state)] == ["custom-checkpointing"]
    through = layers[0]._gradient_checkpointing_func
    made.follow(state, state.slots)
    assert layers[0]._gradient_checkpointing_func is through and through is not plain
    made.detach(state)
    assert [layer._gradient_checkpointing_func for layer in layers[:2]] == [plain, with_more]


def test_under_a_budget_no_function_is_called_around_layers():
    """The plan says what is saved."""
    state, made = checkpointed(Layer(with_more), memory="2GiB")
    assert state.slots[0].checkpoint and state.slots[0].checkpointed_by is None and made.notes(state) == []


def test_a_function_around_a_layer_is_given_its_call():
    seen = []

    def around(run, *args):
        seen.append(args)
        return run(*args)

    slot = types.SimpleNamespace(checkpointed_by=around, compiled=lambda args, kwargs: ("compiled", args, kwargs))
    assert LayerSlot._trained(slot, (1, 2), {"a": 3}) == ("compiled", (1, 2), {"a": 3}) and seen == [(1, 2)]


def test_a_layer_whose_weights_an_engine_places_runs_inside_of_it():
    class Placement:
        def call(self, run, args, kwargs):
            return "placed", run(args, kwargs)

    back = []
    slot = types.SimpleNamespace(placement=None, states=types.SimpleNamespace(put_back=lambda: back.append(1)))
    slot._compiled = lambda args, kwargs, finish: (args, kwargs, finish)
    ran = (1,), {"a": 2}, "finish"
    assert LayerSlot.compiled(slot, *ran) == ran and not back
    slot.placement = Placement()
    assert LayerSlot.compiled(slot, *ran) == ("placed", ran) and back == [1]
    slot.states = None
    assert LayerSlot.compiled(slot, *ran) == ("placed", ran)
