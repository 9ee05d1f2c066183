"""The loop over tokens that stands in the place of transformers' own, with a cache in fixed memory.

`generate` prepares everything as ever: configuration, processors, criteria, repeated rows. It is given this loop as its
decoding method.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tunecompile.integrations import generation, transformers
from tunecompile.notes import KINDS, Note, note
from tunecompile.runtime.cuda_graphs.capture import CudaRecorder, Recorder
from tunecompile.runtime.model_state import State, give_back
from tunecompile.runtime.rollouts import prompt
from tunecompile.runtime.rollouts.choice import Choice
from tunecompile.runtime.rollouts.decode_layers import DecodeLayers
from tunecompile.runtime.rollouts.decode_step import DecodeStep, Rows
from tunecompile.runtime.rollouts.tail import Tail

log = logging.getLogger("tunecompile")
LOOKED = 16  #: tokens after which the host looks whether all rows have ended: it waits for the device then
ROUND = 64  #: tokens to which the length of a cache is rounded: attention is fastest for whole tiles


class Loop:
    """Generates by greedy search or by sampling, with a recording of the step that makes one token of each row."""

    def __init__(self, state: State) -> None:
        self.state = weakref.ref(state)
        self.recorder: Recorder = CudaRecorder()
        #: of one thread: in a step, layers do not know their numbers (`generation.LayerParts`)
        self.turn = threading.RLock()
        self.left: dict[Note, None] = {}  #: why transformers' own loop ran
        self.refused: Note | None = None  #: why steps are not recorded
        self.made_room: Note | None = None  #: that steps' memory was given back for a cache
        self.missed: Counter[int] = Counter()  #: of smaller batches, for `Tail`
        self.calls = self.tokens = 0  #: that this loop ran, and the new tokens of a row in all of them

    def __call__(self, model: Any, input_ids: Tensor, **given: Any) -> Any:
        """What `generate` calls as its decoding method, with the arguments of transformers' `_sample`.

        Args:
            model: transformers' model, in eval mode.
            input_ids: int64 [rows, T], the prompts.
            given: `generation_config`, `logits_processor`, `stopping_criteria`, and what the model is called with.

        Returns:
            int64 [rows, T + new], or the class of outputs that `return_dict_in_generate` requests.
        """
        run = _Run(self, model, input_ids, **given)
        if (why := run.why_left()) is not None:
            self.left[why] = None
            return generation.own_method(model, given["generation_config"])(model, input_ids, **given)
        count, tokens = len(input_ids), run.longest
        with self.turn, _without_cached_casts():
            try:
                return run.generate()
            except torch.OutOfMemoryError:
                if not run.unseen:
                    self._tell(note("generation-memory", rows=count, tokens=tokens))
                    raise
            self.made_room = note("generation-made-room", rows=count, tokens=tokens)
            self._tell(self.made_room)
            del run  # and its cache
            give_back(self._state())
            run = _Run(self, model, input_ids, **given)
            run.why_left()
            try:
                return run.generate()
            except torch.OutOfMemoryError:
                self._tell(note("generation-memory", rows=count, tokens=tokens))
                raise

    def _tell(self, told: Note) -> None:
        log.warning("tunecompile: %s. %s", told, KINDS[told.code].mend)

    def _state(self) -> State:
        state = self.state()
        assert state is not None  # its model generates
        return state

    def record(self, step: DecodeStep) -> Callable[[], tuple[Tensor, Tensor]]:
        """A function that runs the step again: its recording, or the step itself where it cannot be recorded."""
        if self.refused is not None:
            return step
        try:
            (logits, scores), play = self.recorder.record(step, self, step.rows.tokens.device)
        except torch.OutOfMemoryError:  # the next call may have room for a recording
            return step
        except (RuntimeError, NotImplementedError) as error:  # as a rule since the host wants a value
            self.refused = note("generation-not-recorded", detail=str(error).splitlines()[0])
            log.warning("tunecompile: %s", self.refused)
            return step

        def replay() -> tuple[Tensor, Tensor]:
            play()
            return logits, scores

        return replay

    def decoding(self, cache: Any, length: int) -> Callable[[], contextlib.AbstractContextManager]:
        """Makes contexts in which layers run as those of a step. (Adapters may have come since the last one.)"""
        state = self._state()
        state.follow(state.slots)
        layers, step = DecodeLayers(cache, length), state.step

        @contextlib.contextmanager
        def inside() -> Iterator[None]:
            step.rollout = layers
            try:
                yield
            finally:
                step.rollout = None

        return inside

    def notes(self) -> list[Note]:
        """For the report."""
        told = [note("generation-runs", count=self.calls, tokens=self.tokens)] if self.calls else []
        told += [each for each in (self.refused, self.made_room) if each is not None]
        return told + [note("generation-left", detail=why) for why in self.left]


class _Run:
    """One call of `generate`."""

    def __init__(
        self,
        loop: Loop,
        model: Any,
        ids: Tensor,
        *,
        generation_config: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        **kwargs: Any,
    ):
        self.loop, self.model, self.prompt, self.config = loop, model, ids, generation_config
        self.choice = Choice(logits_processor, generation_config.do_sample)
        self.ends, self.criteria = generation.split_criteria(stopping_criteria)
        self.longest = stopping_criteria.max_length
        self.unseen = self.choice.recorded and not self.criteria  #: whether nobody else's code sees rows
        self.kwargs = kwargs
        self.tail: Tail | None = None  #: if rows may be left out
        self.kept: list[tuple[Tensor, Tensor]] = []  #: logits and scores of each token, if the caller wants them

    def why_left(self) -> Note | None:
        """Why transformers' own loop has to generate."""
        if self.prompt.device.type != self.loop.recorder.device:
            return note("generation-device", self.prompt.device.type)
        if (why := generation.why_left(self.model, self.config, self.kwargs, self.longest)) is not None:
            return why
        length = -(-self.longest // ROUND) * ROUND
        self.cache = transformers.static_cache(self.model, length)
        if not self.cache.is_compileable:
            return note("generation-cache", "one that grows")
        if self.config.return_dict_in_generate and not generation.can_be_returned(self.cache):
            return note("generation-cache", "returned")
        self.length = length
        return None

    def generate(self) -> Any:
        """All new tokens."""
        count = len(self.prompt)
        alone = self.unseen and generation.by_rows(self.kwargs)
        if alone:
            self.prompt, self.kwargs = prompt.rounded(self.prompt, self.kwargs)
        rows = self.rows = Rows(self.prompt, self.longest, self.ends, self.config._pad_token_tensor, count)
        if alone and self.ends is not None and not self.config.return_dict_in_generate:
            self.tail = Tail(rows, self.loop.missed)
        at = self.prompt.shape[1]
        self._choose(prompt.fill(self.model, self.prompt, self.config, self.kwargs, self.cache), at)
        at = self._steps(at + 1)
        self.choice.check()
        if self.tail is not None:
            self.tail.gather()
        at = min(at, int(rows.lengths[:count].max()))
        self.loop.calls += 1
        self.loop.tokens += at - self.prompt.shape[1]
        return self._result(rows.tokens[:count, :at].clone())

    def _step(self, rows: Rows) -> DecodeStep:
        # Without `_optimize_model_for_decode`, by which each token copies the matrices of its experts
        layers = self.loop.decoding(self.cache, self.length)
        return DecodeStep(self.model, self.kwargs, rows, self.choice, self.length, layers)

    def _steps(self, at: int) -> int:
        """The steps after the first token. Returns how many tokens rows have, the padding behind their ends included.

        The first one runs as it is: kernels are compiled and libraries take their memory, which no recording allows.
        """
        run = step = self._step(self.rows)
        begin = at
        while at < self.longest and (left := self._left(at)) != 0:
            if left is not None and self.tail is not None and (fewer := self.tail.fewer(left, at, LOOKED)) is not None:
                run = step = self._cut(step, self.tail, fewer)
                begin = at
            if at == begin + 1:
                run = self.loop.record(step)
            logits, scores = run()
            if self.choice.recorded:
                self._shown(logits, scores, at)
            else:
                self._choose(logits, at)
                step.advance()
            at += 1
        return at

    def _cut(self, step: DecodeStep, tail: Tail, fewer: int) -> DecodeStep:
        """The step of rows that have not ended, whose number is `fewer`."""
        rows = tail.cut(fewer)
        transformers.repeat_rows(self.cache, rows)
        self.kwargs = {**step.kwargs, **generation.rows_of(step.kwargs, rows)}
        self.choice.among = len(tail.all.tokens), tail.numbers
        return self._step(tail.rows)

    def _choose(self, logits: Tensor, at: int) -> None:
        """Choose and append the token in column `at`, by the host."""
        scores = self.choice.scores(self.rows.first(at), logits, self.rows.at)
        self.rows.append(self.choice.pick(scores))
        self._shown(logits, scores, at)

    def _shown(self, logits: Tensor, scores: Tensor, at: int) -> None:
        """The token in column `at` is there: what the caller wants of it is kept, and its criteria decide."""
        config = self.config
        if config.return_dict_in_generate and (config.output_scores or config.output_logits):
            self.kept.append((logits.clone(), scores.clone()))
        so_far = tuple(scores for _, scores in self.kept) if config.output_scores else None
        for criterion in self.criteria:
            self.rows.end(criterion(self.rows.first(at + 1), so_far))

    def _left(self, at: int) -> int | None:
        """How many rows have not ended; None if it is no time to look."""
        by_host = self.criteria or not self.choice.recorded  # code of the caller, which may count its calls
        if not by_host and (self.ends is None or (at - self.prompt.shape[1]) % LOOKED):
            return None
        rows = self.rows if self.tail is None else self.tail.rows
        return int((~rows.ended).sum())

    def _result(self, sequences: Tensor) -> Any:
        if not self.config.return_dict_in_generate:
            return sequences
        kept = self.kept[: sequences.shape[1] - self.prompt.shape[1]]
        count = len(sequences)
        logits = tuple(each[0][:count] for each in kept) if self.config.output_logits else None
        scores = tuple(each[1][:count] for each in kept) if self.config.output_scores else None
        return generation.output_of(self.model, sequences, scores, logits, self.cache)


@contextlib.contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Autocast casts weights anew: a cast that was cached before a recording would be gone when it is replayed."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
