"""A choice looks for a place: it asks for one, reserves it, and submits its prompt there."""

from __future__ import annotations

from shared.core.request import events as ev
from shared.core.request.attempt import prefill_job, reserve_request
from shared.core.request.retry_policy import FINAL
from shared.core.request.state import ChoiceState
from shared.protocol.errors import WireError


def started(choice: ChoiceState, event: ev.Started, now: float) -> None:
    choice.deadline = now + choice.config.budget_s
    choice.place(now)


# -- the place -----------------------------------------------------------------------------------------------


def place_answered(choice: ChoiceState, event: ev.PlaceAnswered, now: float) -> None:
    attempt = choice.current()
    place = attempt.placement = event.placement
    last = choice.spec.max_new_tokens - choice.order.next_index == 1
    if place.decode is None and (place.prefill is None or not last):
        choice.fail(WireError("internal", f"impossible placement: {place.reason}"))
        return
    attempt.use(place.prefill, place.decode if place.prefill is None or not last else None)
    choice.nodes |= {ref.node for ref in (attempt.prefill, attempt.decode) if ref is not None}
    if attempt.decode is None:
        _submit(choice, now)
    else:
        choice.phase = "reserving"
        moves = choice.retry_policy.moves
        request = reserve_request(choice.spec, attempt, choice.order.tokens, choice.left(now), moves)
        choice.commands.append(ev.Reserve(attempt.decode, request))


def place_refused(choice: ChoiceState, event: ev.PlaceRefused, now: float) -> None:
    code = event.error.code
    if code == "too_large" and choice.order.tokens:
        choice.finish_short()
        return
    if code in FINAL or (code == "overloaded" and not choice.retry_policy.waits):
        choice.fail(event.error)
        return
    if code != "overloaded":
        choice.retry_policy.kept_waiting = True
    choice.retry_policy.avoid_none()
    choice.try_again(now, event.error)


# -- reserving and submitting --------------------------------------------------------------------------------


def reserve_answered(choice: ChoiceState, event: ev.ReserveAnswered, now: float) -> None:
    attempt = choice.current()
    attempt.landing = event.reserved.landing
    if attempt.prefill is None:
        _run(choice, now)
    else:
        _submit(choice, now)


def _submit(choice: ChoiceState, now: float) -> None:
    attempt = choice.current()
    assert attempt.prefill is not None
    choice.phase = "submitting"
    job = prefill_job(choice.spec, attempt, choice.order.tokens, choice.left(now))
    choice.commands.append(ev.SubmitPrefill(attempt.prefill, job))


def submit_answered(choice: ChoiceState, event: ev.SubmitAnswered, now: float) -> None:
    _run(choice, now)


def _run(choice: ChoiceState, now: float) -> None:
    choice.phase = "running"
    choice.current().heard_at = now


def node_refused(choice: ChoiceState, event: ev.ReserveRefused | ev.SubmitRefused, now: float) -> None:
    """An answer that has outgrown a node looks for a larger one. Once there are tokens, size fails no request."""
    error = event.error
    outgrown = error.code == "too_large" and bool(choice.order.tokens)
    if outgrown and choice.retry_policy.lost():
        choice.finish_short()
        return
    if error.code in FINAL and not outgrown:
        choice.fail(error)
        return
    choice.retry_policy.avoid(choice.current().life_of(event.node), now)
    if error.code != "overloaded":
        choice.retry_policy.retry = True
    elif choice.retry_policy.overloaded() and not choice.order.tokens:
        choice.fail(error)
        return
    choice.try_again(now, error)
