"""The latest decisions with all that they were made on, so that people can ask why (`tsukimi explain`)."""

from __future__ import annotations

from dataclasses import dataclass

from shared.core.conductor.admission import Outlook, Refusal
from shared.core.conductor.policy_view import Decision, PolicyView
from shared.protocol.ids import AttemptId
from shared.protocol.requests import Prediction


@dataclass(slots=True, eq=False)
class Considered:
    """One decision. The view is kept as the policy saw it."""

    attempt: AttemptId
    at_s: float
    view: PolicyView
    decision: Decision
    predicted: Prediction
    outlook: Outlook | None = None
    """What admission looked at; None if nothing could be refused."""
    refusal: Refusal | None = None

    def judged(self, outlook: Outlook, refusal: Refusal | None) -> None:
        self.outlook, self.refusal = outlook, refusal


class DecisionLog:
    """The last `most` decisions by attempt."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._log: dict[AttemptId, Considered] = {}

    def considered(
        self, attempt: AttemptId, now: float, view: PolicyView, decision: Decision, predicted: Prediction
    ) -> Considered:
        """Note a decision. The oldest is forgotten."""
        entry = Considered(attempt, now, view, decision, predicted)
        log = self._log
        log.pop(attempt, None)
        log[attempt] = entry
        if len(log) > self._most:
            del log[next(iter(log))]
        return entry

    def of(self, attempt: AttemptId) -> Considered | None:
        return self._log.get(attempt)

    def of_request(self, request: str) -> list[Considered]:
        """All decisions on a request's attempts, oldest first."""
        return [entry for attempt, entry in self._log.items() if attempt.split("/", 1)[0] == request]
