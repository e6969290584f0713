"""A choice whose attempt runs: its tokens by index, questions about those that fail to come, nodes that are lost."""

from __future__ import annotations

import math

from shared.core.request import events as ev
from shared.core.request.errors import blame
from shared.core.request.state import ChoiceState
from shared.protocol.errors import WireError
from shared.protocol.ids import NodeId
from shared.protocol.requests import TokenDelta

# -- tokens --------------------------------------------------------------------------------------------------


def tokens_arrived(choice: ChoiceState, event: ev.TokensArrived, now: float) -> None:
    attempt = choice.current()
    if not attempt.on(event.node, event.incarnation):
        choice.late += 1  # an attempt belongs to the lives it was placed on
        return
    _take(choice, event.node, event.delta, now)


def _take(choice: ChoiceState, node: NodeId, delta: TokenDelta, now: float) -> None:
    attempt = choice.current()
    attempt.heard(node, delta, now)
    if delta.stages is not None and attempt.placement is not None and not attempt.timed:
        attempt.timed = True
        choice.prefilled = ev.Prefilled(attempt.placement, delta.stages, now - attempt.began_s)
    index = choice.order.next_index
    tokens, logprobs = choice.order.add(delta)
    if delta.cached_tokens is not None and delta.index == 0 and choice.cached_tokens is None:
        choice.cached_tokens = min(max(delta.cached_tokens, 0), choice.spec.prompt_tokens - 1)
    if tokens:
        choice.retry_policy.progressed()
        cached = (choice.cached_tokens or 0) if index == 0 else None
        choice.deliver(ev.Deliver(index, tokens, logprobs, cached))
    if attempt.accepted:
        choice.show()
    if reason := attempt.how_complete(choice.spec, choice.order, tokens):
        choice.tbt_s = attempt.tbt_s
        choice.drop_attempt("complete", all_but=node if attempt.end else "")
        choice.finish(reason, choice.order.next_index)
    elif delta.finish == "moved":
        choice.retry_policy.avoid(attempt.life_of(node), now)
        choice.retry_policy.moved()
        choice.try_again(now, WireError("unavailable", delta.error or "the node gave the request up"))
    elif delta.finish == "refused":
        choice.fail(WireError("overloaded", delta.error, retry_after_s=delta.retry_after_s))
    elif delta.finish == "failed":
        choice.fail(blame(delta.error, choice.spec.sampling, choice.order.next_index))
    else:
        attempt.watch_gap(choice.order, now)


# -- asking what became of them ------------------------------------------------------------------------------


def ask_makers(choice: ChoiceState, now: float) -> None:
    """Ask the node that should be making tokens (one question out per node)."""
    attempt = choice.current()
    attempt.gap_since = math.inf
    for node in attempt.makers(choice.order.next_index):
        if node not in attempt.asked:
            attempt.asked.add(node)
            choice.syncs += 1
            choice.commands.append(ev.AskSync(node, attempt.id, choice.order.next_index))


def sync_answered(choice: ChoiceState, event: ev.SyncAnswered, now: float) -> None:
    attempt = choice.current()
    attempt.asked.discard(event.node)
    attempt.unanswered = 0
    attempt.heard_at = now
    if event.state.delta is not None and _absorb(choice, event.node, event.state.delta, now):
        return
    if why := attempt.judge_answer(event.node, event.state.state, choice.order):
        choice.lose(now, why)


def _absorb(choice: ChoiceState, node: NodeId, delta: TokenDelta, now: float) -> bool:
    """Take a sync's tokens; True if the attempt is over or something new came."""
    before = choice.current(), choice.order.next_index
    _take(choice, node, delta, now)
    return choice.phase != "running" or (choice.attempt, choice.order.next_index) != before


def sync_failed(choice: ChoiceState, event: ev.SyncFailed, now: float) -> None:
    attempt = choice.current()
    attempt.asked.discard(event.node)
    attempt.heard_at = now
    if choice.bus_down:
        return
    patient = now - choice.bus_found_at <= choice.config.bus_grace_s
    if attempt.judge_silence(event.node, event.error, patient, choice.config.sync_tries):
        choice.retry_policy.avoid(attempt.life_of(event.node), now)
        if attempt.hopeless_without(event.node, choice.order.next_index):
            choice.lose(now, f"{event.node}: {event.error.message or event.error.code}")


def node_suspected(choice: ChoiceState, event: ev.NodeSuspected, now: float) -> None:
    attempt = choice.attempt
    if choice.phase == "running" and attempt is not None and attempt.on(event.node, event.incarnation):
        ask_makers(choice, now)


def node_lost(choice: ChoiceState, event: ev.NodeLost, now: float) -> None:
    choice.retry_policy.avoid((event.node, event.incarnation), now)
    attempt = choice.attempt
    if attempt is None or not attempt.on(event.node, event.incarnation):
        return
    first_made = choice.phase == "running" and choice.order.next_index > attempt.first_index
    if first_made and attempt.only_prefills(event.node):
        attempt.prefill_lost = True  # the hand-over may have been complete: the decode node knows
        ask_makers(choice, now)
    else:
        choice.lose(now, f"{event.node} was lost")
