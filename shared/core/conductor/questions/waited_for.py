"""Whether somebody still waits for the answer to a question.

A conductor that was stopped, or is behind, finds questions that were given up meanwhile. To answer them would book places
that nobody takes, and keep those who do wait from an answer.
"""

from __future__ import annotations

from collections import OrderedDict

from shared.core.conductor.questions.delays import Delays
from shared.protocol.ids import AttemptId
from shared.protocol.requests import PlaceRequest

GIVEN_UP_KEPT = 4096
"""Attempts given up before their question was read. They come together, on two subjects of which neither is first."""


class WaitedFor:
    """Knows by the asker's word, or by how late the question is."""

    def __init__(self) -> None:
        self._delays = Delays()
        self._given_up: OrderedDict[AttemptId, None] = OrderedDict()

    def given_up(self, attempt: AttemptId) -> None:
        """The asker said so."""
        self._given_up[attempt] = None
        if len(self._given_up) > GIVEN_UP_KEPT:
            self._given_up.popitem(last=False)

    def too_late(self, request: PlaceRequest, now: float) -> str:
        """Why nobody waits for it any more; empty if somebody does, or may."""
        late_s = 0.0
        if request.waits_s > 0.0:
            late_s = self._delays.delay_s(request.asker, request.asked_at_s, now)
        if request.attempt in self._given_up:
            return "given up"
        if late_s > request.waits_s:
            return f"read {late_s:.1f} s after it was asked, and it is waited for {request.waits_s:g} s"
        return ""

    def check(self) -> None:
        assert len(self._given_up) <= GIVEN_UP_KEPT, "too many attempts that were given up are remembered"
