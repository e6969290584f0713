"""The data plane as a batching machine sees it: everything takes a while, may fail, and ends exactly once.

It also checks the pages. A page being written by a step, a landing or a fetch is used by nothing else: it is not
computed on, sent or written to by others until the command that named it has ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from shared.core.worker import transfers as t
from shared.core.worker.steps import RunStep
from shared.protocol.ids import AttemptId
from tests.support.worlds.workers import BLOCK

Later = Callable[[float, Callable[[], None]], None]
Use = tuple[AttemptId, str]


class Pages:
    """The readers and the writer of each page."""

    def __init__(self, total: int) -> None:
        self._readers: list[set[Use]] = [set() for _ in range(total)]
        self._writers: list[set[Use]] = [set() for _ in range(total)]

    def take(self, attempt: AttemptId, what: str, pages: Iterable[int], *, write: bool) -> None:
        use = (attempt, what)
        for page in pages:
            users = self._writers[page] | self._readers[page] if write else self._writers[page]
            others = {user for user, _ in users} - {attempt}
            assert not others, f"page {page}: {use} while {others} use it"
            (self._writers if write else self._readers)[page].add(use)

    def drop(self, attempt: AttemptId, what: str, pages: Iterable[int]) -> None:
        for page in pages:
            self._writers[page].discard((attempt, what))
            self._readers[page].discard((attempt, what))

    def in_use(self) -> set[Use]:
        return set().union(*self._readers, *self._writers)

    def step(self, step: RunStep) -> None:
        for s in step.sequences:
            first = s.start // BLOCK
            last = (s.start + s.tokens + step.up_to - 2) // BLOCK
            assert last < len(s.pages), f"{s.attempt} computes beyond its pages"
            self.take(s.attempt, "step", s.pages[:first], write=False)
            self.take(s.attempt, "step", s.pages[first : last + 1], write=True)

    def step_over(self, step: RunStep) -> None:
        for s in step.sequences:
            self.drop(s.attempt, "step", s.pages)


class Plane:
    """Carries out transfers. `trouble`: the probability that a transfer fails."""

    def __init__(
        self, rng: random.Random, trouble: float, pages: Pages, later: Later, feed: Callable[[Any], None]
    ) -> None:
        self._rng, self._trouble, self._pages, self._later, self._feed = rng, trouble, pages, later, feed
        self._open: dict[tuple[AttemptId, str], tuple[int, ...]] = {}
        """KVStreams and landings that have not ended, and their pages."""
        self.lost_landings: set[AttemptId] = set()
        """Landings that nobody will ever write to. Only a lease ends them."""

    def idle(self) -> bool:
        return not self._open and not self._pages.in_use()

    def execute(self, command: Any) -> None:
        match command:
            case t.FetchBlocks():
                self._fetch(command)
            case t.OpenHandoff(attempt, _, pages):
                self._begin(attempt, "handoff", pages, write=False)
                self._maybe(0.3, lambda: self._end_handoff(attempt, False))
            case t.OpenPoolWrite(attempt, _, _, _, keys, pages):
                assert len(keys) == len(pages)
                self._begin(attempt, "put", pages, write=False)
                self._maybe(0.3, lambda: self._end_put(attempt, 0, "the cache node is gone"))
            case t.CommitHandoff(attempt):
                ok = self._rng.random() >= self._trouble
                self._soon(lambda: self._end_handoff(attempt, ok))
            case t.CommitPoolWrite(attempt):
                self._soon(lambda: self._end_put(attempt, 1, ""))
            case t.AbortStreams(attempt, handoff, pool):
                if handoff:
                    self._soon(lambda: self._end_handoff(attempt, False))
                if pool:
                    self._soon(lambda: self._end_put(attempt, 0, "aborted"))
            case t.OpenLanding(attempt, _, pages):
                self._land(attempt, pages)
            case t.CloseLanding(attempt):
                self.lost_landings.discard(attempt)
                self._soon(lambda: self._end_landing(t.LandingClosed(attempt)))

    # -- in ------------------------------------------------------------------------------------------------------------

    def _fetch(self, command: t.FetchBlocks) -> None:
        assert len(command.keys) == len(command.pages) > 0
        self._begin(command.attempt, "fetch", command.pages, write=True)
        whole = self._rng.random() >= self._trouble
        got = len(command.keys) if whole else self._rng.randrange(len(command.keys))

        def fetched() -> None:
            self._over(command.attempt, "fetch")
            error = "" if whole else "missing"
            self._feed(
                t.BlocksFetched(command.attempt, command.source.first_block, got, error, 0.01, command.turn)
            )

        self._soon(fetched)

    def _land(self, attempt: AttemptId, pages: tuple[int, ...]) -> None:
        self._begin(attempt, "landing", pages, write=True)
        chance = self._rng.random()
        if chance < self._trouble:
            self.lost_landings.add(attempt)
            return
        end: Any = t.LandingArrived(attempt, self._rng.randrange(90), cached_tokens=self._rng.randrange(9))
        if chance < 2 * self._trouble:
            end = t.LandingFailed(attempt, "a block is corrupt")
        for _ in range(self._rng.randrange(3)):
            self._later(self._delay_s(), lambda: self._progress(attempt))
        self._later(self._delay_s() + 0.05, lambda: self._end_landing(end))

    def _progress(self, attempt: AttemptId) -> None:
        if (attempt, "landing") in self._open:
            self._feed(t.LandingProgressed(attempt))

    def _end_landing(self, event: t.LandingArrived | t.LandingFailed | t.LandingClosed) -> None:
        if self._over(event.attempt, "landing"):
            self._feed(event)

    # -- out -----------------------------------------------------------------------------------------------------------

    def _end_handoff(self, attempt: AttemptId, ok: bool) -> None:
        if self._over(attempt, "handoff"):
            self._feed(t.HandoffEnded(attempt, ok, "" if ok else "the decode node is gone"))

    def _end_put(self, attempt: AttemptId, stored: int, error: str) -> None:
        if self._over(attempt, "put"):
            self._feed(t.PoolWriteEnded(attempt, stored, error))

    # -- both ----------------------------------------------------------------------------------------------------------

    def _begin(self, attempt: AttemptId, what: str, pages: tuple[int, ...], *, write: bool) -> None:
        assert (attempt, what) not in self._open, f"two of {attempt}'s {what}"
        self._open[attempt, what] = pages
        self._pages.take(attempt, what, pages, write=write)

    def _over(self, attempt: AttemptId, what: str) -> bool:
        """Mark a transfer as ended. Returns False if it had already ended."""
        pages = self._open.pop((attempt, what), None)
        if pages is None:
            return False
        self._pages.drop(attempt, what, pages)
        return True

    def _soon(self, work: Callable[[], None]) -> None:
        self._later(self._delay_s(), work)

    def _maybe(self, most_s: float, work: Callable[[], None]) -> None:
        if self._rng.random() < self._trouble:
            self._later(self._rng.random() * most_s, work)

    def _delay_s(self) -> float:
        return self._rng.expovariate(30.0)
