"""What may come to a choice at any time: ticks, the client's wishes, the bus, and news of attempts given up before."""

from __future__ import annotations

import math

from shared.core.machine import BusFound, BusLost, Event, Ticked
from shared.core.request import events as ev
from shared.core.request.answering import ask_makers
from shared.core.request.state import ChoiceState
from shared.protocol.errors import WireError


def ticked(choice: ChoiceState, event: Ticked, now: float) -> None:
    if now >= choice.timer:
        choice.timer = math.inf
    if now >= choice.deadline:
        late = WireError("deadline_exceeded", f"not complete within {choice.config.budget_s:g} s")
        choice.fail(late if choice.phase == "running" else choice.retry_policy.last_error)
    elif choice.phase == "waiting" and now >= choice.resume_at:
        choice.place(now)
    elif choice.phase == "running" and now >= choice.next_timer():
        ask_makers(choice, now)


def client_gone(choice: ChoiceState, event: ev.ClientGone, now: float) -> None:
    choice.drop_attempt(event.reason or "client gone")
    choice.end("aborted")


def stop_met(choice: ChoiceState, event: ev.StopMet, now: float) -> None:
    choice.drop_attempt("stop string met")
    choice.finish("stop", event.tokens)


def bus_lost(choice: ChoiceState, event: BusLost, now: float) -> None:
    choice.bus_down = True


def bus_found(choice: ChoiceState, event: BusFound, now: float) -> None:
    choice.bus_down = False
    choice.bus_found_at = now
    if choice.phase == "running":
        ask_makers(choice, now)
    elif choice.phase == "waiting":
        choice.resume_at = now
        choice.place(now)


def stale(choice: ChoiceState, event: Event, now: float) -> None:
    """Of an earlier attempt or after the end. A node that still works on it is told again, once."""
    if isinstance(event, ev.TokensArrived | ev.ReserveAnswered | ev.SubmitAnswered):
        choice.late += 1
        done = isinstance(event, ev.TokensArrived) and event.delta.finish is not None
        done |= isinstance(event, ev.SubmitAnswered) and choice.outcome == "finished"
        if not done and (event.node, event.attempt) not in choice.told_again:
            choice.told_again.add((event.node, event.attempt))
            choice.commands.append(ev.Cancel(event.node, event.attempt, "given up before"))
