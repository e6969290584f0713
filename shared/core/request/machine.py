"""One choice of a request, from its first placement to its last token, whatever dies in between.

The owner's side: it places an attempt, follows its tokens by index, asks when they fail to come, and places the
rest (prompt + tokens so far) again when a node is lost. What an earlier attempt still sends is ignored and counted.

    new -> placing -> reserving -> submitting -> running -> ended
              ^  \\________|______________|___________|
              |                 (refused, lost, moved)
            waiting (back-off)  <-----------'

A RequestMachine has a ChoiceState. TABLE has the handlers, which change that state: those of `placing`, `answering` and
`interruptions`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from shared.core.machine import BusFound, BusLost, Command, Event, Ticked
from shared.core.request import answering, interruptions, placing
from shared.core.request import events as ev
from shared.core.request.attempt import Attempt
from shared.core.request.state import ChoiceState, Phase

Handler = Callable[[ChoiceState, Any, float], None]


class InvalidTransition(Exception):
    """The shell broke the contract; the message tells the request's story."""


class RequestMachine:
    """Gives every token of one choice once and in order through Deliver, then exactly one Finish or Fail (none when
    the client left). Late and repeated events are harmless. Not concurrent."""

    def __init__(self, spec: ev.ChoiceSpec, config: ev.LifecycleConfig | None = None) -> None:
        self._choice = ChoiceState(spec, config)
        self._story: deque[tuple[float, str, str]] = deque(maxlen=40)
        self.spec = spec
        self.config = self._choice.config
        self.order = self._choice.order
        """The answer so far."""
        self.nodes = self._choice.nodes
        """All that took part in some attempt."""

    def handle(self, event: Event, now: float) -> list[Command]:
        choice = self._choice
        commands: list[Command] = []
        choice.commands = commands
        phase, kind = choice.phase, type(event)
        attempt = getattr(event, "attempt", None)
        if phase == "ended" or (
            attempt is not None and (choice.attempt is None or attempt != choice.attempt.id)
        ):
            handler: Handler = interruptions.stale
        else:
            phases, handler = TABLE.get(kind, _NEVER)
            if phase not in phases:
                raise InvalidTransition(self._tell(event))
        self._story.append((now, phase, kind.__name__))
        handler(choice, event, now)
        at = choice.next_timer()
        if at < choice.timer:  # a sooner one that is out already serves as well
            choice.timer = at
            commands.append(ev.SetTimer(at))
        choice.commands = []  # those are the shell's now: carried out, they go while they are still at hand
        return commands

    def _tell(self, event: Event) -> str:
        story = "".join(f"\n  {at:.3f} {phase}: {name}" for at, phase, name in self._story)
        choice = f"choice {self.spec.choice} of {self.spec.request}"
        return f"{type(event).__name__} in {self.phase}, {choice}{story}"

    def next_timer(self) -> float:
        """When time alone will next matter; infinity if never."""
        return self._choice.next_timer()

    def check(self) -> None:
        self._choice.check()

    # -- what shells and reports look at -----------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self._choice.phase

    @property
    def outcome(self) -> str:
        """finished, failed or aborted, once ended."""
        return self._choice.outcome

    @property
    def attempt(self) -> Attempt | None:
        """The one that is running."""
        return self._choice.attempt

    @property
    def attempts(self) -> int:
        """How many were begun."""
        return self._choice.attempts

    @property
    def cached_tokens(self) -> int | None:
        """How many of the prompt's tokens were not computed; None before the first token."""
        return self._choice.cached_tokens

    @property
    def prefilled(self) -> ev.Prefilled | None:
        """What computing the prompt took, at the last attempt that did, beside what was predicted; None: not told."""
        return self._choice.prefilled

    @property
    def tbt_s(self) -> float:
        """Once finished: mean time between tokens at the last attempt's decode node; 0: too few tokens, or none there."""
        return self._choice.tbt_s

    @property
    def late(self) -> int:
        """Messages of attempts that were given up."""
        return self._choice.late

    @property
    def syncs(self) -> int:
        """Questions asked."""
        return self._choice.syncs


_LIVE = frozenset({"waiting", "placing", "reserving", "submitting", "running"})
_PLACED = frozenset({"reserving", "submitting", "running"})
_NEVER = frozenset[str](), interruptions.stale

TABLE: dict[type[Event], tuple[frozenset[str], Handler]] = {
    ev.Started: (frozenset({"new"}), placing.started),
    Ticked: (_LIVE, interruptions.ticked),
    ev.ClientGone: (_LIVE, interruptions.client_gone),
    ev.StopMet: (_LIVE, interruptions.stop_met),
    ev.PlaceAnswered: (frozenset({"placing"}), placing.place_answered),
    ev.PlaceRefused: (frozenset({"placing"}), placing.place_refused),
    ev.ReserveAnswered: (frozenset({"reserving"}), placing.reserve_answered),
    ev.ReserveRefused: (frozenset({"reserving"}), placing.node_refused),
    ev.SubmitAnswered: (frozenset({"submitting"}), placing.submit_answered),
    ev.SubmitRefused: (frozenset({"submitting"}), placing.node_refused),
    ev.TokensArrived: (_PLACED, answering.tokens_arrived),
    ev.SyncAnswered: (frozenset({"running"}), answering.sync_answered),
    ev.SyncFailed: (frozenset({"running"}), answering.sync_failed),
    ev.NodeSuspected: (_LIVE, answering.node_suspected),
    ev.NodeLost: (_LIVE, answering.node_lost),
    BusLost: (_LIVE, interruptions.bus_lost),
    BusFound: (_LIVE, interruptions.bus_found),
}
"""In which phases an event may come, and what it does. Anything else is a fault of the shell."""
