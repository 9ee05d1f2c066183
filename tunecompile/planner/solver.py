"""Choose a plan for each layer, so that the fastest step fits: a pure function of bytes and milliseconds.

A layer has a few options, each with the bytes it holds until the layer's backward and the time it costs. Only options
on the lower convex hull of time over bytes can be part of the best assignment (up to one layer). So layers move along
the hull, the cheapest byte first, until the step fits. Where the host is full, the hull is that of the options that
offload no more. Early layers move before late ones: the last layer's backward runs while all other layers still hold
their activations, and should not need memory for its own recomputation.

Bytes that a layer needs only while it runs are not part of what it holds, and one such layer is as bad as all of them.
So the search runs under a few ceilings on these bytes, from the highest to the lowest possible, and the fastest
assignment that fits is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast


@dataclass(frozen=True)
class Plan:
    """What a layer recomputes in its backward pass, beside all that is cheap."""

    #: matrix products and attentions, by their place among `candidates.expensive_nodes`. None: everything but attention
    recompute: frozenset[int] | None = frozenset()
    tiles: int = 1  #: tiles of the tokens in which ops with a wide intermediate value run; 1: not tiled
    weights: bool = False  #: whether frozen weights stay in the layout that products read, from one step to the next
    attention: bool = False  #: whether attention is recomputed too, where it draws no random numbers

    @property
    def key(self) -> str:
        """The plan as text, part of the cache keys of compiled code."""
        again = "all" if self.recompute is None else ",".join(map(str, sorted(self.recompute)))
        return (
            again
            + (f" in {self.tiles}" if self.tiles > 1 else "")
            + (" with weights" if self.weights else "")
            + (" and attention" if self.attention else "")
        )


KEEP, RECOMPUTE, KEEP_WEIGHTS = Plan(), Plan(None), Plan(weights=True)

#: layers beside the running one whose offloaded tensors are on the device too, on their way to the host or back
AHEAD = 2
#: fewer layers ahead must cost at most this share of the milliseconds: with one ahead, a layer that is shorter than the
#: layer before it waits for its copies
WORTH = 0.9


@dataclass(frozen=True)
class PlanOption:
    """What a plan costs one layer, in bytes on the device and in milliseconds."""

    plan: Plan
    held: int  #: bytes held on the device from the layer's forward to its backward
    forward: int  #: bytes its forward needs beside those, while it runs
    backward: int  #: bytes its backward needs beside those, while it runs
    ms: float  #: milliseconds on top of the fastest option
    offloaded: int = 0  #: bytes that go to the host; what is held is one tensor then
    work: float = 0.0  #: milliseconds of forward and backward, all included
    copying: float = 0.0  #: milliseconds more where no other layer's work hides the copies
    gradients: int = 0  #: bytes of its parameters' gradients, which exist from its backward on
    passed: int = 0  #: bytes, of those it holds, that it hands to the next layer
    kind: int = field(default=0, compare=False)  #: of its layer: layers of one kind and plan run the same graph

    def offloads_tensor(self, nbytes: int) -> bool:
        """Whether a saved tensor of `nbytes` bytes goes to the host.

        (A batch may be smaller than the one of this option.)
        """
        return self.offloaded > 0 and (not self.held or 2 * nbytes <= self.held)

    def transient(self, ahead: int) -> int:
        """Bytes needed only while the layer runs among layers of the same option, with copies `ahead` layers ahead."""
        return max(self.forward, self.backward) + (1 + ahead) * self.offloaded


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers of one kind, and the options of each."""

    layers: int
    options: tuple[PlanOption, ...]

    def offloading_at_most(self, nbytes: int) -> LayerRun:
        """With the options that offload so many bytes at most; as it is where it has no choice."""
        if len(self.options) == 1:
            return self
        return LayerRun(self.layers, tuple(option for option in self.options if option.offloaded <= nbytes))


@dataclass(frozen=True)
class Assignment:
    """An option for every layer, and what all of them need together."""

    options: tuple[tuple[PlanOption, ...], ...]  #: for each run of layers an option a layer
    peak: int  #: bytes the layers, head and loss need at most
    fits: bool  #: whether the peak is within the limit
    ahead: int = AHEAD  #: layers that copies go ahead

    @property
    def ms(self) -> float:
        """Milliseconds a step takes beyond the fastest options."""
        return sum(option.ms for stack in self.options for option in stack)

    @property
    def work(self) -> float:
        """Milliseconds of all layers, forward and backward."""
        return sum(option.work for stack in self.options for option in stack)

    @property
    def waiting(self) -> int:
        """Bytes offloaded to the host."""
        return _waiting(self.options)

    @property
    def offloads(self) -> bool:
        """Whether anything is offloaded."""
        return self.waiting > 0


def smaller_options(options: Sequence[PlanOption], now: PlanOption) -> list[PlanOption]:
    """The options that hold fewer bytes than `now`, the fewest milliseconds a byte first."""
    smaller = [option for option in options if option.held < now.held]
    return sorted(smaller, key=lambda o: (_ms_per_byte(now, o), o.held))


def _ms_per_byte(now: PlanOption, then: PlanOption) -> float:
    """Milliseconds that a layer pays for each byte it frees by going from `now` to `then`."""
    return (then.ms - now.ms) / (now.held - then.held)


def peak(stacks: Sequence[Sequence[PlanOption]], tail: int, ahead: int = AHEAD) -> int:
    """The most bytes that a step needs beside what is resident anyway.

    The maximum is over each layer's forward, over head and loss, and over each layer's backward, where later layers
    hold nothing more and their gradients exist.

    Args:
        stacks: an option for every layer, in the order in which layers run.
        tail: bytes that head and loss need while all layers hold theirs.
        ahead: layers that copies go ahead.

    Returns:
        Bytes.
    """
    order = [option for stack in stacks for option in stack]
    held, moving, highest, gradients = 0, 0, tail, sum(option.gradients for option in order)
    for place, option in enumerate(order):
        # `copies`, as a running sum
        moving += option.offloaded - (order[place - ahead - 1].offloaded if place > ahead else 0)
        held += option.held
        gradients -= option.gradients
        back = option.backward + gradients
        needed = held + moving + (option.forward if option.forward > back else back)
        highest = needed if needed > highest else highest
    return max(highest, held + tail)


def copies(order: Sequence[PlanOption | None], place: int, ahead: int = AHEAD) -> int:
    """Bytes of offloaded tensors on the device while layer `place` runs: its own and the `ahead` layers' before it."""
    return sum(option.offloaded for option in order[max(0, place - ahead) : place + 1] if option is not None)


def choose(stacks: Sequence[LayerRun], room: int, tail: int = 0, host: int | None = None) -> Assignment:
    """The fastest assignment whose peak is at most `room` bytes; the one with the lowest peak where none fits.

    Args:
        stacks: runs of layers with their options, in the order in which they run.
        room: bytes on the device for all layers, head and loss.
        tail: bytes that head and loss need while all layers hold theirs.
        host: bytes that may be offloaded; None for no limit.

    Returns:
        An option for every layer, with the peak in bytes.
    """
    free = _fastest(stacks, room, tail, None)
    if host is None or free.waiting <= host:
        return free
    # A limit for each layer, since a few layers could fill the host and leave the rest without an option that fits.
    shared = ([stack.offloading_at_most(most) for stack in stacks] for most in _shares(stacks, host))
    found = [_fastest(each, room, tail, host) for each in shared]
    best = min([choice for choice in found if choice.waiting <= host] or found[:1], key=_rank)
    return _use_up(best, _priced(stacks, best.ahead), room, tail, host) if best.fits else best


def _fastest(stacks: Sequence[LayerRun], room: int, tail: int, host: int | None) -> Assignment:
    """The best assignment over the numbers of layers that copies may go ahead. Bytes, as in `choose`."""
    best = _choose(stacks, room, tail, host, AHEAD)
    for ahead in (1, 0):
        if not best.fits or best.ms:
            found = _choose(_priced(stacks, ahead), room, tail, host, ahead)
            better = found.fits and found.ms < WORTH * best.ms if best.fits else _rank(found) < _rank(best)
            best = found if better else best
    return _keep_last(best, stacks, room, tail)


def _priced(stacks: Sequence[LayerRun], ahead: int) -> Sequence[LayerRun]:
    """Options that include their copies' milliseconds where none go ahead: every layer waits for its own then."""
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
    """Bytes offloaded to the host."""
    return sum(option.offloaded for stack in options for option in stack)


def _shares(stacks: Sequence[LayerRun], host: int) -> list[int]:
    """Limits in bytes on what one layer offloads, from an equal share of the host to the most that any option offloads.

    Each limit is one and a half times the one before at least. Layers without a choice have theirs.
    """
    free = [stack for stack in stacks if len(stack.options) > 1]
    taken = sum(stack.layers * stack.options[0].offloaded for stack in stacks if len(stack.options) == 1)
    found = [max(0, host - taken) // max(1, sum(stack.layers for stack in free))]
    for nbytes in sorted({option.offloaded for stack in free for option in stack.options}):
        if nbytes >= 1.5 * found[-1] or (len(found) == 1 and nbytes > found[0]):
            found.append(nbytes)
    return found


def _use_up(choice: Assignment, stacks: Sequence[LayerRun], room: int, tail: int, host: int) -> Assignment:
    """Make an assignment that fits faster, one layer at a time, while there is memory left on the device and the host.

    The move with the most milliseconds saved a byte of either comes first. `room`, `tail` and `host` are bytes.
    """
    while True:
        left, best = host - choice.waiting, None
        for s, stack in enumerate(stacks):
            taken = choice.options[s]
            last = {option: layer for layer, option in enumerate(taken)}  # of layers with the same option, the last
            for now, layer in last.items():
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
    """The fastest assignment that fits under any ceiling on transient bytes; else the one with the lowest peak."""
    best: Assignment | None = None
    for ceiling in _ceilings(stacks, ahead):
        allowed = [
            LayerRun(stack.layers, tuple(o for o in stack.options if o.transient(ahead) <= ceiling)) for stack in stacks
        ]
        found = _descend(allowed, room, tail, host, ahead)
        if best is None or _rank(found) < _rank(best):
            best = found
        if best.fits and best.ms <= sum(stack.layers * min(o.ms for o in stack.options) for stack in stacks):
            break
    assert best is not None  # there is always a ceiling
    return best


def _keep_last(choice: Assignment, stacks: Sequence[LayerRun], room: int, tail: int) -> Assignment:
    """Keep the last layer's activations on the device where they fit: no work hides their copies."""
    last = choice.options[-1][-1]
    stays = next((o for o in stacks[-1].options if o.plan == last.plan and not o.offloaded), None)
    if not last.offloaded or stays is None:
        return choice
    options = (*choice.options[:-1], (*choice.options[-1][:-1], stays))
    needed = peak(options, tail, choice.ahead)
    return Assignment(options, needed, needed <= room, choice.ahead) if needed <= max(room, choice.peak) else choice


def _rank(choice: Assignment) -> tuple[bool, float]:
    """Smaller is better: by milliseconds among assignments that fit, by peak bytes among the others."""
    return not choice.fits, choice.ms if choice.fits else choice.peak


def _ceilings(stacks: Sequence[LayerRun], ahead: int) -> list[int]:
    """Ceilings on transient bytes, each a tenth lower or more, down to the lowest that gives every layer an option."""
    lowest = max(min(o.transient(ahead) for o in stack.options) for stack in stacks)
    found: list[int] = []
    for bytes_ in sorted({o.transient(ahead) for stack in stacks for o in stack.options}, reverse=True):
        if not found or lowest < bytes_ <= 0.9 * found[-1]:
            found.append(bytes_)
    return found if found[-1] <= lowest else [*found, lowest]


def _descend(stacks: Sequence[LayerRun], room: int, tail: int, host: int | None, ahead: int) -> Assignment:
    """Move layer after layer from its fastest option to options that hold fewer bytes, until the step fits."""
    at = [[min(stack.options, key=lambda o: (o.ms, o.held))] * stack.layers for stack in stacks]
    ways: list[dict[int, list[PlanOption]]] = [{} for _ in stacks]
    moves: list[Move | None] = [None] * len(stacks)
    moved: Iterable[int] = range(len(stacks))

    def options() -> tuple[tuple[PlanOption, ...], ...]:
        return tuple(map(tuple, at))

    best = Assignment(options(), needed := peak(at, tail, ahead), needed <= room, ahead)
    while not best.fits:
        left = None if host is None else host - _waiting(at)
        too_large = (s for s, move in enumerate(moves) if move is not None and left is not None and move[3] > left)
        for s in {*moved, *too_large}:
            moves[s] = min(_moves(stacks[s], at[s], ways[s], left), key=lambda move: move[:2], default=None)
        known = [(move[0], s) for s, move in enumerate(moves) if move is not None]
        if not known:
            break
        s = min(known)[1]
        moved = (s,)
        _, layer, then, _ = cast(Move, moves[s])
        at[s][layer] = then
        needed = peak(at, tail, ahead)
        if needed < best.peak:  # a move may need more than it frees: recomputing a layer needs memory, too
            best = Assignment(options(), needed, needed <= room, ahead)
    return best


#: milliseconds a byte, layer of a run, its option then, and bytes more that go to the host
Move = tuple[float, int, PlanOption, int]


def _moves(
    stack: LayerRun, taken: Sequence[PlanOption], ways: dict[int, list[PlanOption]], left: int | None
) -> Iterator[Move]:
    """The moves of a run's layers for which `left` bytes on the host suffice.

    Of layers with the same option the first moves. left: None for no limit. ways: by option, filled here.
    """
    for now in {id(option): option for option in taken}.values():  # options have long hashes
        if id(now) not in ways:
            ways[id(now)] = smaller_options(stack.options, now)
        for then in ways[id(now)]:
            more = then.offloaded - now.offloaded
            if left is None or more <= left:
                yield _ms_per_byte(now, then), taken.index(now), then, more
                break


def describe_plan(plan: dict[str, Any]) -> str:
    """An entry of a report's `plans`, as the predicate of a sentence about layers."""
    parts = [
        f"recompute {', '.join(plan['recompute'])}" if plan["recompute"] else "keep all that is expensive to recompute"
    ]
    if plan["tiles"] > 1:
        parts.append(f"MLP in {plan['tiles']} tiles")
    if plan["offload"]:
        parts.append(f"{'all but the largest tensor' if plan['largest_stays'] else 'the rest'} is offloaded")
    return "; ".join(parts)


def plan_lines(plans: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each plan: how many layers follow it, and what they do."""
    return [f"    {plan['layers']:3d} layers {describe_plan(plan)}" for plan in plans]
