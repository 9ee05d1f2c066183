"""Which plan each layer follows, so that the fastest step fits: a pure function of bytes and milliseconds.

A layer has a few plans to choose from, each with the bytes it holds until the layer's backward and the time it costs. Only those on
the lower convex hull of time over bytes can be part of the best choice (up to one layer), so layers are moved along it, the cheapest byte
first, until the step fits. Where the host is full, the hull is that of what goes there no more. Early layers move before late ones: the last layer's backward runs while all others still hold
what they saved, and should not need room to compute its own again.

What a layer needs only while it runs is not in these bytes, and one layer's is as bad as all layers'. So the search is made under a
few ceilings on it, from none to the lowest there is, and the fastest choice that fits is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Plan:
    """What a layer computes again in its backward pass: the matrix products and attentions of these numbers, in the order of its
    forward graph, beside all that is cheap. None: everything but attention. tiles: in how many pieces of the tokens it computes what can be
    computed so and is wide inside. weights: whether its frozen weights stay as matrix products read them, from one step to the next.
    attention: whether it is computed again, too, where it draws no random numbers."""

    recompute: frozenset[int] | None = frozenset()
    tiles: int = 1
    weights: bool = False
    attention: bool = False

    @property
    def key(self) -> str:
        again = "all" if self.recompute is None else ",".join(map(str, sorted(self.recompute)))
        return (
            again
            + (f" in {self.tiles}" if self.tiles > 1 else "")
            + (" with weights" if self.weights else "")
            + (" and attention" if self.attention else "")
        )


KEEP, RECOMPUTE, KEEP_WEIGHTS = Plan(), Plan(None), Plan(weights=True)


AHEAD = (
    2  #: layers before the one that runs whose copies are on the device too, on their way to the host or back from it
)
WORTH = 0.9  #: of the time that a plan costs with that many: with one, a layer that takes less time than the one before waits for its copies


@dataclass(frozen=True)
class PlanOption:
    """A plan's price for one layer: bytes held on the device from its forward to its backward, bytes its forward and backward need
    beside that while they run, bytes that go to the host (what is held is one tensor then), and milliseconds on top of the fastest option. work: milliseconds of both, all included.
    copying: how much more it is where no other layer's work hides its copies. gradients: bytes of its parameters' that are there from its backward on."""

    plan: Plan
    held: int
    forward: int
    backward: int
    ms: float
    offloaded: int = 0
    work: float = 0.0
    copying: float = 0.0
    gradients: int = 0

    def leaves(self, nbytes: int) -> bool:
        """Whether a saved tensor of so many bytes goes to the host. (A batch may be smaller than the one this is the option of.)"""
        return self.offloaded > 0 and (not self.held or 2 * nbytes <= self.held)

    def passing(self, ahead: int) -> int:
        """Bytes that are needed while the layer runs among its like, and no longer."""
        return max(self.forward, self.backward) + (1 + ahead) * self.offloaded


@dataclass(frozen=True)
class LayerRun:
    """Layers of one kind, in the order in which they run, and what they may choose from."""

    layers: int
    options: tuple[PlanOption, ...]


@dataclass(frozen=True)
class Assignment:
    """For each stack an option for each layer; the bytes the regions need at the peak; whether that fits; how many layers ahead copies go."""

    options: tuple[tuple[PlanOption, ...], ...]
    peak: int
    fits: bool
    ahead: int = AHEAD

    @property
    def ms(self) -> float:
        return sum(option.ms for stack in self.options for option in stack)

    @property
    def work(self) -> float:
        """Milliseconds of all layers."""
        return sum(option.work for stack in self.options for option in stack)

    @property
    def waiting(self) -> int:
        """Bytes on the host."""
        return _waiting(self.options)

    @property
    def offloads(self) -> bool:
        return self.waiting > 0


def onward(options: Sequence[PlanOption], now: PlanOption) -> list[PlanOption]:
    """What holds less than this one does, the cheapest byte first."""
    smaller = [option for option in options if option.held < now.held]
    return sorted(smaller, key=lambda o: (_price(now, o), o.held))


def _price(now: PlanOption, then: PlanOption) -> float:
    """Milliseconds a byte."""
    return (then.ms - now.ms) / (now.held - then.held)


def peak(stacks: Sequence[Sequence[PlanOption]], tail: int, ahead: int = AHEAD) -> int:
    """Of a step: the most bytes beside what is there anyway, over each layer's forward, head and loss, and each layer's backward, when what later layers
    held is gone, and their gradients are there."""
    order = [option for stack in stacks for option in stack]
    held, moving, highest, gradients = 0, 0, tail, sum(option.gradients for option in order)
    for place, option in enumerate(order):
        moving += option.offloaded - (
            order[place - ahead - 1].offloaded if place > ahead else 0
        )  # `copies`, as a running sum
        held += option.held
        gradients -= option.gradients
        back = option.backward + gradients
        needed = held + moving + (option.forward if option.forward > back else back)
        highest = needed if needed > highest else highest
    return max(highest, held + tail)


def copies(order: Sequence[PlanOption | None], place: int, ahead: int = AHEAD) -> int:
    """Bytes on the device while this layer runs, its own and those of the layers before it, of what waits on the host otherwise."""
    return sum(option.offloaded for option in order[max(0, place - ahead) : place + 1] if option is not None)


def choose(stacks: Sequence[LayerRun], room: int, tail: int = 0, host: int | None = None) -> Assignment:
    """The fastest choice whose peak is at most `room`; the smallest there is where none fits.

    tail: bytes that head and loss need while all layers hold theirs. host: bytes that may go to the host; None for no limit.
    """
    free = _fastest(stacks, room, tail, None)
    if host is None or free.waiting <= host:
        return free
    shared = (
        [LayerRun(stack.layers, tuple(o for o in stack.options if o.offloaded <= most)) for stack in stacks]
        for most in _shares(stacks, host)
    )
    found = [
        _fastest(each, room, tail, host) for each in shared
    ]  # a few layers could fill the host, and leave no way for the rest
    best = min((choice for choice in found if choice.waiting <= host), key=_rank)
    return _use_up(best, _priced(stacks, best.ahead), room, tail, host) if best.fits else best


def _fastest(stacks: Sequence[LayerRun], room: int, tail: int, host: int | None) -> Assignment:
    """By the number of layers that copies go ahead."""
    best = _choose(stacks, room, tail, host, AHEAD)
    for ahead in (1, 0):
        if not best.fits or best.ms:
            found = _choose(_priced(stacks, ahead), room, tail, host, ahead)
            better = found.fits and found.ms < WORTH * best.ms if best.fits else _rank(found) < _rank(best)
            best = found if better else best
    return _keep_last(best, stacks, room, tail)


def _priced(stacks: Sequence[LayerRun], ahead: int) -> Sequence[LayerRun]:
    """With none ahead, every layer waits for its copies."""
    if ahead:
        return stacks
    return [
        LayerRun(
            stack.layers,
            tuple(replace(o, ms=o.ms + o.copying, work=o.work + o.copying, copying=0.0) for o in stack.options),
        )
        for stack in stacks
    ]


def _waiting(options: Sequence[Sequence[PlanOption]]) -> int:
    """Bytes on the host."""
    return sum(option.offloaded for stack in options for option in stack)


def _shares(stacks: Sequence[LayerRun], host: int) -> list[int]:
    """Bytes that one layer may send to the host: from as many as every layer could to as many as any would, each half as much again at least."""
    found = [host // sum(stack.layers for stack in stacks)]
    for nbytes in sorted({option.offloaded for stack in stacks for option in stack.options}):
        if nbytes >= 1.5 * found[-1] or (len(found) == 1 and nbytes > found[0]):
            found.append(nbytes)
    return found


def _use_up(choice: Assignment, stacks: Sequence[LayerRun], room: int, tail: int, host: int) -> Assignment:
    """What fits, made faster one layer at a time while there is room on the device and the host: what saves most time for a byte of either."""
    while True:
        left, best = host - choice.waiting, None
        for s, stack in enumerate(stacks):
            taken = choice.options[s]
            for now, layer in {
                option: layer for layer, option in enumerate(taken)
            }.items():  # of layers that do alike, the last
                for option in stack.options:
                    if option.ms >= now.ms or (more := option.offloaded - now.offloaded) > left:
                        continue
                    options = (
                        *choice.options[:s],
                        (*taken[:layer], option, *taken[layer + 1 :]),
                        *choice.options[s + 1 :],
                    )
                    needed = peak(options, tail, choice.ahead)
                    gain = (now.ms - option.ms) / max(1, more + needed - choice.peak)
                    if needed <= room and (best is None or gain > best[0]):
                        best = gain, Assignment(options, needed, True, choice.ahead)
        if best is None:
            return choice
        choice = best[1]


def _choose(stacks: Sequence[LayerRun], room: int, tail: int, host: int | None, ahead: int) -> Assignment:
    best = None
    for ceiling in _ceilings(stacks, ahead):
        allowed = [
            LayerRun(stack.layers, tuple(o for o in stack.options if o.passing(ahead) <= ceiling)) for stack in stacks
        ]
        found = _descend(allowed, room, tail, host, ahead)
        if best is None or _rank(found) < _rank(best):
            best = found
        if best.fits and best.ms <= sum(stack.layers * min(o.ms for o in stack.options) for stack in stacks):
            break
    return best


def _keep_last(choice: Assignment, stacks: Sequence[LayerRun], room: int, tail: int) -> Assignment:
    """What the last layer saved is read at once: no work hides its copies. It stays, where there is room for it."""
    last = choice.options[-1][-1]
    stays = next((o for o in stacks[-1].options if o.plan == last.plan and not o.offloaded), None)
    if not last.offloaded or stays is None:
        return choice
    options = (*choice.options[:-1], (*choice.options[-1][:-1], stays))
    needed = peak(options, tail, choice.ahead)
    return Assignment(options, needed, needed <= room, choice.ahead) if needed <= max(room, choice.peak) else choice


def _rank(choice: Assignment) -> tuple[bool, float]:
    return not choice.fits, choice.ms if choice.fits else choice.peak


def _ceilings(stacks: Sequence[LayerRun], ahead: int) -> list[int]:
    """From the highest on, each a tenth lower at least, to the lowest under which every layer has an option."""
    lowest = max(min(o.passing(ahead) for o in stack.options) for stack in stacks)
    found: list[int] = []
    for bytes_ in sorted({o.passing(ahead) for stack in stacks for o in stack.options}, reverse=True):
        if not found or lowest < bytes_ <= 0.9 * found[-1]:
            found.append(bytes_)
    return found if found[-1] <= lowest else [*found, lowest]


def _descend(stacks: Sequence[LayerRun], room: int, tail: int, host: int | None, ahead: int) -> Assignment:
    """Layer after layer from its fastest option to those that hold less, until the step fits."""
    at = [[min(stack.options, key=lambda o: (o.ms, o.held))] * stack.layers for stack in stacks]
    ways: list[dict[PlanOption, list[PlanOption]]] = [{} for _ in stacks]

    def options() -> tuple[tuple[PlanOption, ...], ...]:
        return tuple(map(tuple, at))

    best = Assignment(options(), needed := peak(at, tail, ahead), needed <= room, ahead)
    while not best.fits:
        left = None if host is None else host - _waiting(at)
        if not (moves := list(_moves(stacks, at, ways, left))):
            break
        _, stack, layer, then = min(moves, key=lambda move: move[:3])
        at[stack][layer] = then
        needed = peak(at, tail, ahead)
        if needed < best.peak:  # a move may need more than it frees: room to compute a layer again
            best = Assignment(options(), needed, needed <= room, ahead)
    return best


def _moves(
    stacks: Sequence[LayerRun],
    at: Sequence[Sequence[PlanOption]],
    ways: Sequence[dict[PlanOption, list[PlanOption]]],
    left: int | None,
):
    """(milliseconds a byte, stack, layer, option) of the cheapest move that the host has room for: of layers that do alike, the first's."""
    for s, taken in enumerate(at):
        for now in dict.fromkeys(taken):
            if now not in ways[s]:
                ways[s][now] = onward(stacks[s].options, now)
            if (
                then := next((o for o in ways[s][now] if left is None or o.offloaded - now.offloaded <= left), None)
            ) is not None:
                yield _price(now, then), s, taken.index(now), then


def in_words(plan: dict[str, Any]) -> str:
    """What an entry of `plans_by_layer` says, as a sentence's predicate."""
    said = f"compute again: {', '.join(plan['recompute'])}" if plan["recompute"] else "keep what is dear to compute"
    said += f"; MLP in {plan['tiles']} pieces" if plan["tiles"] > 1 else ""
    waiting = "all but the largest tensor" if plan["largest_stays"] else "the rest"
    return f"{said}; {waiting} waits on the host" if plan["offload"] else said


def plan_lines(plans: Sequence[dict[str, Any]]) -> list[str]:
    """How many layers do what."""
    return [f"    {plan['layers']:3d} layers {in_words(plan)}" for plan in plans]
