"""Checks, from a worker machine's commands alone, that each accepted attempt ends properly and is not starved.

Endings. An accepted attempt ends exactly once: with a delta that has a finish, with a hand-over, or, if its owner
cancelled it or is gone, silently. Its tokens come without gaps or repeats, none after the finish, no more than wanted.

No starvation. Work is finite and served in order of arrival. If a ready attempt is left out of a step, that step advances
an attempt accepted before this one was last served. So between two steps of a ready attempt there are at most as many
successful steps as all other attempts live at the first one still needed together.
"""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from shared.core.worker.steps import RunStep
from shared.protocol.ids import AttemptId, Incarnation
from shared.protocol.requests import TokenDelta


class Account(Struct, eq=False):
    attempt: AttemptId
    owner: Incarnation
    """The life of the gateway that owns it."""
    need: int
    """Most steps it still takes. Each step computes one block of the prompt or one token."""
    most_tokens: int
    next_index: int
    first_index: int = 0
    landed: bool = False
    """Its KV arrived with the first token, which the prefill node has reported to the gateway."""
    ready: bool = False
    """Whether it can be computed now."""
    served_at: int = 0
    """Number of successful steps when it was last in a step, or became ready."""
    patience: int = 0
    """Steps that all other live attempts still needed at that time: the longest it may wait."""
    finish: str = ""
    owner_gone: bool = False
    silenced: bool = False
    """Cancelled while live: no delta may follow."""
    handed_over: bool = False

    def __post_init__(self) -> None:
        self.first_index = self.next_index


class Accounts:
    def __init__(self) -> None:
        self.all: dict[AttemptId, Account] = {}
        self.steps = 0
        self.failed_steps = 0
        self.longest_wait = 0
        """Most successful steps in a row that left out a ready attempt."""
        self.endings: Counter[str] = Counter()
        self._lives_over: set[Incarnation] = set()

    # -- what happened -------------------------------------------------------------------------------------------------

    def accepted(self, account: Account) -> None:
        assert account.attempt not in self.all, f"{account.attempt} was accepted twice"
        account.owner_gone = account.owner in self._lives_over
        self.all[account.attempt] = account

    def got_ready(self, attempt: AttemptId, live: tuple[AttemptId, ...]) -> None:
        account = self.all[attempt]
        account.ready = True
        self._serve(account, self._needed(live))

    def not_ready(self, attempt: AttemptId) -> None:
        self.all[attempt].ready = False

    def computed(self, attempt: AttemptId) -> None:
        """All of it is computed: it needs no more steps."""
        account = self.all[attempt]
        account.ready, account.need = False, 0

    def launched(self, step: RunStep, live: tuple[AttemptId, ...]) -> None:
        self.steps += 1
        needed = self._needed(live)
        rows = {s.attempt for s in step.sequences}
        assert len(rows) == len(step.sequences), "a sequence is in a step twice"
        for row in rows:
            assert self.all[row].ready, f"{row} is computed before it can be"
            self._serve(self.all[row], needed)
        for attempt in live:
            account = self.all[attempt]
            if account.ready and attempt not in rows:
                waited = self.steps - self.failed_steps - account.served_at
                self.longest_wait = max(self.longest_wait, waited)
                assert waited <= account.patience, (
                    f"{attempt} starves: it waited {waited} steps, at most {account.patience} are allowed"
                )

    def ran(self, step: RunStep) -> None:
        for row in step.sequences:
            account = self.all[row.attempt]
            account.need -= 1
            assert account.need >= 0, f"{row.attempt} was computed more often than it needs"

    def landed(self, attempt: AttemptId) -> None:
        account = self.all[attempt]
        account.landed = True
        account.next_index += 1

    def step_failed(self) -> None:
        self.failed_steps += 1

    def told(self, delta: TokenDelta) -> None:
        account = self.all[delta.attempt]
        assert not account.finish, f"{delta} after {account.finish}"
        assert not account.silenced, f"{delta} after its cancel"
        assert not account.handed_over, f"{delta} after its hand-over"
        again = account.landed and delta.index == account.first_index and delta.finish is not None
        assert again or delta.index == account.next_index, f"{delta}: the next index is {account.next_index}"
        account.next_index = delta.index + len(delta.tokens)
        assert account.next_index - account.first_index <= account.most_tokens, f"{delta}: too many tokens"
        taken = account.landed and delta.index == account.first_index + 1
        assert delta.tokens or delta.finish or taken, f"{delta} says nothing"
        account.finish = delta.finish or ""

    def cancelled(self, attempt: AttemptId, *, live: bool) -> None:
        account = self.all.get(attempt)
        if account is not None:
            account.owner_gone = True
            account.silenced = live

    def life_over(self, owner: Incarnation) -> None:
        self._lives_over.add(owner)
        for account in self.all.values():
            account.owner_gone |= account.owner == owner

    # -- laws ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """At the end of a life: check that each attempt has ended."""
        for account in self.all.values():
            silent = account.handed_over or account.owner_gone
            assert account.finish or silent, f"{account.attempt} never ended"
            kind = account.finish or ("handed over" if account.handed_over else "silence")
            self.endings[kind] += 1
        self.all.clear()
        self._lives_over.clear()

    def _serve(self, account: Account, needed: int) -> None:
        account.served_at = self.steps - self.failed_steps
        account.patience = needed - account.need

    def _needed(self, live: tuple[AttemptId, ...]) -> int:
        return sum([self.all[attempt].need for attempt in live])
