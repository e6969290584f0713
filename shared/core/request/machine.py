"""One choice of a request, from its first placement to its last token, whatever dies in between.

The owner's side: it places an attempt, follows its tokens by index, asks when they fail to come, and places the
rest (prompt + tokens so far) again when a node is lost. What an earlier attempt still sends is ignored and counted.

    new -> placing -> reserving -> submitting -> running -> ended
              ^  \\________|______________|___________|
              |                 (refused, lost, moved)
            waiting (back-off)  <-----------'
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shared.core.machine import BusFound, BusLost, Command, Event, Ticked
from shared.core.request import events as ev
from shared.core.request.attempt import prefill_job, reserve_request
from shared.core.request.errors import blame
from shared.core.request.retry_policy import FINAL
from shared.core.request.state import ChoiceState
from shared.protocol.errors import WireError
from shared.protocol.ids import NodeId
from shared.protocol.requests import TokenDelta

Handler = Callable[["RequestMachine", Any, float], None]


class InvalidTransition(Exception):
    """The shell broke the contract; the message tells the request's story."""


class RequestMachine(ChoiceState):
    """Gives every token of one choice once and in order through Deliver, then exactly one Finish or Fail (none when
    the client left). Late and repeated events are harmless. Not concurrent."""

    # -- the table ---------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        commands: list[Command] = []
        self._commands = commands
        phase, kind = self.phase, type(event)
        attempt = getattr(event, "attempt", None)
        if phase == "ended" or (attempt is not None and (self.attempt is None or attempt != self.attempt.id)):
            handler: Handler = RequestMachine._on_stale
        else:
            phases, handler = TABLE.get(kind, _NEVER)
            if phase not in phases:
                raise InvalidTransition(self._tell(event))
        self._story.append((now, phase, kind.__name__))
        handler(self, event, now)
        at = self.next_timer()
        if at < self._timer:  # a sooner one that is out already serves as well
            self._timer = at
            commands.append(ev.SetTimer(at))
        self._commands = []  # those are the shell's now: carried out, they go while they are still at hand
        return commands

    def _tell(self, event: Event) -> str:
        story = "".join(f"\n  {at:.3f} {phase}: {name}" for at, phase, name in self._story)
        choice = f"choice {self.spec.choice} of {self.spec.request}"
        return f"{type(event).__name__} in {self.phase}, {choice}{story}"

    # -- start, time, client -----------------------------------------------------------------------------------

    def _on_started(self, event: ev.Started, now: float) -> None:
        self._deadline = now + self.config.budget_s
        self._place(now)

    def _on_ticked(self, event: Ticked, now: float) -> None:
        if now >= self._timer:
            self._timer = math.inf
        if now >= self._deadline:
            late = WireError("deadline_exceeded", f"not complete within {self.config.budget_s:g} s")
            self._fail(late if self.phase == "running" else self._retry_policy.last_error)
        elif self.phase == "waiting" and now >= self._resume_at:
            self._place(now)
        elif self.phase == "running" and now >= self.next_timer():
            self._ask_makers(now)

    def _on_client_gone(self, event: ev.ClientGone, now: float) -> None:
        self._drop_attempt(event.reason or "client gone")
        self._end("aborted")

    def _on_stop_met(self, event: ev.StopMet, now: float) -> None:
        self._drop_attempt("stop string met")
        self._finish("stop", event.tokens)

    # -- the place ---------------------------------------------------------------------------------------------

    def _on_place_answered(self, event: ev.PlaceAnswered, now: float) -> None:
        attempt = self._current()
        place = attempt.placement = event.placement
        last = self.spec.max_new_tokens - self.order.next_index == 1
        if place.decode is None and (place.prefill is None or not last):
            self._fail(WireError("internal", f"impossible placement: {place.reason}"))
            return
        attempt.use(place.prefill, place.decode if place.prefill is None or not last else None)
        self.nodes |= {ref.node for ref in (attempt.prefill, attempt.decode) if ref is not None}
        if attempt.decode is None:
            self._submit(now)
        else:
            self.phase = "reserving"
            request = reserve_request(self.spec, attempt, self.order.tokens, self._left(now))
            self._commands.append(ev.Reserve(attempt.decode, request))

    def _on_place_refused(self, event: ev.PlaceRefused, now: float) -> None:
        code = event.error.code
        if code in FINAL or (code == "overloaded" and not self._retry_policy.retry):
            self._fail(event.error)
            return
        self._retry_policy.avoid_none()
        self._try_again(now, event.error)

    # -- reserving and submitting ------------------------------------------------------------------------------

    def _on_reserve_answered(self, event: ev.ReserveAnswered, now: float) -> None:
        attempt = self._current()
        attempt.landing = event.reserved.landing
        if attempt.prefill is None:
            self._run(now)
        else:
            self._submit(now)

    def _submit(self, now: float) -> None:
        attempt = self._current()
        assert attempt.prefill is not None
        self.phase = "submitting"
        job = prefill_job(self.spec, attempt, self.order.tokens, self._left(now))
        self._commands.append(ev.SubmitPrefill(attempt.prefill, job))

    def _on_submit_answered(self, event: ev.SubmitAnswered, now: float) -> None:
        self._run(now)

    def _run(self, now: float) -> None:
        self.phase = "running"
        self._current().heard_at = now

    def _on_node_refused(self, event: ev.ReserveRefused | ev.SubmitRefused, now: float) -> None:
        error = event.error
        if error.code in FINAL:
            self._fail(error)
            return
        self._retry_policy.avoid(self._current().life_of(event.node), now)
        if error.code != "overloaded":
            self._retry_policy.retry = True
        elif self._retry_policy.overloaded() and not self.order.tokens:
            self._fail(error)
            return
        self._try_again(now, error)

    # -- tokens ------------------------------------------------------------------------------------------------

    def _on_tokens(self, event: ev.TokensArrived, now: float) -> None:
        attempt = self._current()
        if not attempt.on(event.node, event.incarnation):
            self.late += 1  # an attempt belongs to the lives it was placed on
            return
        self._take(event.node, event.delta, now)

    def _take(self, node: NodeId, delta: TokenDelta, now: float) -> None:
        attempt = self._current()
        attempt.heard(node, delta, now)
        index = self.order.next_index
        tokens, logprobs = self.order.add(delta)
        if delta.cached_tokens is not None and delta.index == 0 and self.cached_tokens is None:
            self.cached_tokens = min(max(delta.cached_tokens, 0), self.spec.prompt_tokens - 1)
        if tokens:
            self._retry_policy.progressed()
            cached = (self.cached_tokens or 0) if index == 0 else None
            self._commands.append(ev.Deliver(index, tokens, logprobs, cached))
        if reason := attempt.how_complete(self.spec, self.order, tokens):
            self._drop_attempt("complete", all_but=node if attempt.end else "")
            self._finish(reason, self.order.next_index)
        elif delta.finish == "moved":
            self._retry_policy.avoid(attempt.life_of(node), now)
            self._retry_policy.retry = True
            self._try_again(now, WireError("unavailable", delta.error or "the node gave the request up"))
        elif delta.finish == "failed":
            self._fail(blame(delta.error, self.spec.sampling, self.order.next_index))
        else:
            attempt.watch_gap(self.order, now)

    # -- asking what became of them ----------------------------------------------------------------------------

    def _ask_makers(self, now: float) -> None:
        """Ask the node that should be making tokens (one question out per node)."""
        attempt = self._current()
        attempt.gap_since = math.inf
        for node in attempt.makers(self.order.next_index):
            if node not in attempt.asked:
                attempt.asked.add(node)
                self.syncs += 1
                self._commands.append(ev.AskSync(node, attempt.id, self.order.next_index))

    def _on_sync_answered(self, event: ev.SyncAnswered, now: float) -> None:
        attempt = self._current()
        attempt.asked.discard(event.node)
        attempt.unanswered = 0
        attempt.heard_at = now
        if event.state.delta is not None and self._absorb(event.node, event.state.delta, now):
            return
        if why := attempt.judge_answer(event.node, event.state.state, self.order):
            self._lose(now, why)

    def _absorb(self, node: NodeId, delta: TokenDelta, now: float) -> bool:
        """Take a sync's tokens; True if the attempt is over or something new came."""
        before = self._current(), self.order.next_index
        self._take(node, delta, now)
        return self.phase != "running" or (self.attempt, self.order.next_index) != before

    def _on_sync_failed(self, event: ev.SyncFailed, now: float) -> None:
        attempt = self._current()
        attempt.asked.discard(event.node)
        attempt.heard_at = now
        if self._bus_down:
            return
        patient = now - self._bus_found_at <= self.config.bus_grace_s
        if attempt.judge_silence(event.node, event.error, patient, self.config.sync_tries):
            self._retry_policy.avoid(attempt.life_of(event.node), now)
            if attempt.hopeless_without(event.node, self.order.next_index):
                self._lose(now, f"{event.node}: {event.error.message or event.error.code}")

    def _on_node_suspected(self, event: ev.NodeSuspected, now: float) -> None:
        attempt = self.attempt
        if self.phase == "running" and attempt is not None and attempt.on(event.node, event.incarnation):
            self._ask_makers(now)

    def _on_node_lost(self, event: ev.NodeLost, now: float) -> None:
        self._retry_policy.avoid((event.node, event.incarnation), now)
        attempt = self.attempt
        if attempt is None or not attempt.on(event.node, event.incarnation):
            return
        first_made = self.phase == "running" and self.order.next_index > attempt.first_index
        if first_made and attempt.only_prefills(event.node):
            attempt.prefill_lost = True  # the hand-over may have been complete: the decode node knows
            self._ask_makers(now)
        else:
            self._lose(now, f"{event.node} was lost")

    def _on_bus_lost(self, event: BusLost, now: float) -> None:
        self._bus_down = True

    def _on_bus_found(self, event: BusFound, now: float) -> None:
        self._bus_down = False
        self._bus_found_at = now
        if self.phase == "running":
            self._ask_makers(now)
        elif self.phase == "waiting":
            self._resume_at = now
            self._place(now)

    def _on_stale(self, event: Event, now: float) -> None:
        """Of an earlier attempt or after the end. A node that still works on it is told again, once."""
        if isinstance(event, ev.TokensArrived | ev.ReserveAnswered | ev.SubmitAnswered):
            self.late += 1
            done = isinstance(event, ev.TokensArrived) and event.delta.finish is not None
            done |= isinstance(event, ev.SubmitAnswered) and self.outcome == "finished"
            if not done and (event.node, event.attempt) not in self._told_again:
                self._told_again.add((event.node, event.attempt))
                self._commands.append(ev.Cancel(event.node, event.attempt, "given up before"))


_LIVE = frozenset({"waiting", "placing", "reserving", "submitting", "running"})
_PLACED = frozenset({"reserving", "submitting", "running"})
_NEVER = frozenset[str](), RequestMachine._on_stale

TABLE: dict[type[Event], tuple[frozenset[str], Handler]] = {
    ev.Started: (frozenset({"new"}), RequestMachine._on_started),
    Ticked: (_LIVE, RequestMachine._on_ticked),
    ev.ClientGone: (_LIVE, RequestMachine._on_client_gone),
    ev.StopMet: (_LIVE, RequestMachine._on_stop_met),
    ev.PlaceAnswered: (frozenset({"placing"}), RequestMachine._on_place_answered),
    ev.PlaceRefused: (frozenset({"placing"}), RequestMachine._on_place_refused),
    ev.ReserveAnswered: (frozenset({"reserving"}), RequestMachine._on_reserve_answered),
    ev.ReserveRefused: (frozenset({"reserving"}), RequestMachine._on_node_refused),
    ev.SubmitAnswered: (frozenset({"submitting"}), RequestMachine._on_submit_answered),
    ev.SubmitRefused: (frozenset({"submitting"}), RequestMachine._on_node_refused),
    ev.TokensArrived: (_PLACED, RequestMachine._on_tokens),
    ev.SyncAnswered: (frozenset({"running"}), RequestMachine._on_sync_answered),
    ev.SyncFailed: (frozenset({"running"}), RequestMachine._on_sync_failed),
    ev.NodeSuspected: (_LIVE, RequestMachine._on_node_suspected),
    ev.NodeLost: (_LIVE, RequestMachine._on_node_lost),
    BusLost: (_LIVE, RequestMachine._on_bus_lost),
    BusFound: (_LIVE, RequestMachine._on_bus_found),
}
"""In which phases an event may come, and what it does. Anything else is a fault of the shell."""
