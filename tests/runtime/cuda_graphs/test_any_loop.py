"""Random loops over recorded layers give the gradients of the same layers without a recorder.

The stand-in for CUDA graphs overwrites at each replay what a real pool may overwrite, so that a recording which is
replayed too early, or over what a backward still needs, gives no numbers.
"""

import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.memory.recorded_stack import RecordedStack
from tunecompile.runtime.cuda_graphs import launch_bound, replay

LENGTHS = (6, 6, 6, 8, 5)


def gradients(out, leaves, gradient, retain=False):
    for leaf in leaves:
        leaf.grad = None
    out.backward(gradient, retain_graph=retain)
    return [leaf.grad for leaf in leaves]


class Loop:
    """Acts of a training loop, drawn at random. `pending` are forwards whose backward is still to come."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.stack = RecordedStack(layers=self.rng.randint(3, 5), plans=self.rng.randint(1, 2))
        self.pending = []
        self.drawn = 0

    def order(self):
        order = list(range(len(self.stack.weights)))
        if self.rng.random() < 0.25:
            self.rng.shuffle(order)
        if self.rng.random() < 0.25:
            order = order[: self.rng.randint(1, len(order))]
        if self.rng.random() < 0.1:
            order.insert(self.rng.randrange(len(order)), self.rng.choice(order))
        return order

    def forward(self, length=None, run=None):
        """(order, input, output) of one forward."""
        self.drawn += 1
        length = length or self.rng.choice(LENGTHS)
        x = torch.rand(length, 3, generator=torch.Generator().manual_seed(self.drawn)).requires_grad_()
        order = self.order()
        return order, x, (run or self.stack.run)(order, x)

    def check(self, made, retain=False):
        """The backward of a forward, against the plain one."""
        order, x, out = made
        leaves = [x, *(self.stack.weights[layer] for layer in sorted(set(order)))]
        scale = torch.linspace(1, 2, out.numel()).view_as(out)
        found = gradients(out, leaves, scale, retain)
        plain = self.stack.run(order, x, plain=True)
        torch.testing.assert_close(out, plain)
        for ours, theirs in zip(found, gradients(plain, leaves, scale)):
            torch.testing.assert_close(ours, theirs)

    # acts

    def step(self):
        self.check(self.forward())

    def steps(self):
        length = self.rng.choice(LENGTHS)
        for _ in range(4):
            self.check(self.forward(length))

    def accumulate(self):
        made = [self.forward() for _ in range(self.rng.randint(2, 3))]
        self.rng.shuffle(made)
        for each in made:
            self.check(each)

    def sum_of_two(self):
        length = self.rng.choice(LENGTHS)
        (first, x, a), (second, y, b) = self.forward(length), self.forward(length)
        leaves = [x, y, *self.stack.weights]
        found = gradients(a + 2 * b, leaves, torch.ones_like(a))
        a, b = self.stack.run(first, x, plain=True), self.stack.run(second, y, plain=True)
        expected = gradients(a + 2 * b, leaves, torch.ones_like(a))
        for ours, theirs in zip(found, expected):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(ours, theirs)

    def leave_pending(self):
        self.pending.append(self.forward())

    def finish_pending(self):
        if self.pending:
            self.check(self.pending.pop(self.rng.randrange(len(self.pending))))

    def give_up_pending(self):
        if self.pending:
            self.pending.pop(self.rng.randrange(len(self.pending)))

    def twice(self):
        made = self.forward()
        self.check(made, retain=True)
        self.rng.choice([self.step, self.score, self.leave_pending, lambda: None])()
        self.check(made)

    def score(self):
        with torch.no_grad():
            order, x, out = self.forward()
            torch.testing.assert_close(out, self.stack.run(order, x, plain=True))

    def score_between(self):
        made = self.forward()
        self.score()
        self.check(made)

    def fail(self):
        """A layer raises behind the first ones: their backward never comes."""
        try:
            order, x, out = self.forward()
            raise ValueError(order, x, out)
        except ValueError:
            pass

    def checkpointed(self):
        """Layers one by one, or some of them together."""

        def run(order, x):
            size = self.rng.choice([1, 1, 2, len(order)])
            for first in range(0, len(order), size):
                x = checkpoint(self.stack.run, order[first : first + size], x, use_reentrant=self.rng.random() < 0.5)
            return x

        self.check(self.forward(run=run))

    def forget(self):
        self.stack.replays.forget()

    def forget_between(self):
        made = self.forward()
        self.forget()
        self.rng.choice([self.steps, self.step, lambda: None])()
        self.check(made)

    def forget_in_the_middle(self):
        def run(order, x):
            middle = len(order) // 2
            x = self.stack.run(order[:middle], x)
            self.forget()
            return self.stack.run(order[middle:], x)

        self.check(self.forward(run=run))

    def drop(self):
        places = [(plan.forward.pool, place) for plan in self.stack.plans for place in plan.forward.places.values()]
        if places:
            pool, place = self.rng.choice(places)
            pool.drop(place)

    def no_room(self):
        """For forwards, for backwards, or now and then. (They have so many inputs.)"""
        draw, what = self.rng.random, self.rng.choice([4, 6, None])
        self.stack.replays.room = lambda given: len(given) != what if what else draw() < 0.5

    def room(self):
        self.stack.replays.__dict__.pop("room", None)

    def room_for_backwards_comes_late(self):
        """When other shapes lie over what their forwards save."""
        self.stack.replays.room = lambda given: len(given) == 4
        self.steps()
        self.steps()
        self.room()
        self.steps()

    def move_the_table(self):
        if not self.pending:
            self.stack.table.data = self.stack.table.data + 0.1

    def move_a_weight(self):
        if not self.pending:
            place = self.rng.randrange(len(self.stack.weights))
            weight = self.stack.weights[place]
            weight.data = weight.data.clone()

    def train(self):
        if not self.pending:
            with torch.no_grad():
                for weight in self.stack.weights:
                    weight.mul_(0.99)

    def other_plan(self):
        place = self.rng.randrange(len(self.stack.weights))
        self.stack.plan_of[place] = self.rng.randrange(len(self.stack.plans))

    ACTS = (
        (step, 6), (steps, 8), (accumulate, 4), (sum_of_two, 2), (leave_pending, 2), (finish_pending, 2),
        (give_up_pending, 1), (twice, 3), (score, 1), (score_between, 2), (fail, 1), (checkpointed, 3),
        (forget, 0.3), (forget_between, 0.5), (forget_in_the_middle, 0.5), (drop, 1.5), (no_room, 0.7), (room, 1.5),
        (room_for_backwards_comes_late, 0.7), (move_a_weight, 0.4), (move_the_table, 0.2), (train, 1), (other_plan, 0.3),
    )  # fmt: skip

    def act(self):
        acts, weights = zip(*self.ACTS)
        act = self.rng.choices(acts, weights)[0]
        act(self)
        return act.__name__


@pytest.fixture
def eager_to_record(monkeypatch):
    monkeypatch.setattr(launch_bound, "SAMPLES", 1)
    monkeypatch.setattr(launch_bound.Clock, "decide", lambda self: True)
    monkeypatch.setattr(replay, "MAX_SHARE", 1e9)


@pytest.mark.usefixtures("eager_to_record")
@pytest.mark.parametrize("seed", range(6))
def test_any_loop_gives_the_gradients_of_plain_layers(seed, monkeypatch):
    replayed = []
    inner = replay.Recording.replay
    monkeypatch.setattr(
        replay.Recording, "replay", lambda self, given: replayed.append(self.handed) or inner(self, given)
    )
    loop = Loop(seed)
    done = []
    for _ in range(150):
        try:
            done.append(loop.act())
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, after {len(done)} acts: {done[-12:]}") from error
    while loop.pending:
        loop.finish_pending()
    assert replayed.count(1) > 100 and replayed.count(2) > 100, "forwards and backwards are replayed"
