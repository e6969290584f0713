"""What the owner of a request knows of one of its choices, and the moves that need no event of their own: asking for a
place, giving an attempt up, ending."""

from __future__ import annotations

import math
from typing import Literal

from shared.core.machine import Command
from shared.core.request import events as ev
from shared.core.request.attempt import Attempt, End, place_request
from shared.core.request.retry_policy import RetryPolicy
from shared.core.request.token_order import TokenOrder
from shared.protocol.errors import WireError
from shared.protocol.ids import AttemptId, NodeId, attempt_id

Phase = Literal["new", "waiting", "placing", "reserving", "submitting", "running", "ended"]


class ChoiceState:
    """All that one RequestMachine remembers. Only the handlers of its table change it."""

    def __init__(self, spec: ev.ChoiceSpec, config: ev.LifecycleConfig | None = None) -> None:
        self.spec = spec
        self.config = config or ev.LifecycleConfig()
        self.phase: Phase = "new"
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.order = TokenOrder(spec.max_new_tokens)
        self.cached_tokens: int | None = None
        self.nodes: set[NodeId] = set()
        """All that took part in some attempt."""
        self.late = 0
        self.syncs = 0
        self.prefilled: ev.Prefilled | None = None
        self.tbt_s = 0.0
        self.outcome = ""
        """finished, failed or aborted, once ended."""
        self.commands: list[Command] = []
        self.deadline = math.inf
        self.timer = math.inf
        """When the timer that is out goes off."""
        self.resume_at = math.inf
        self.bus_down = False
        self.bus_found_at = -math.inf
        self.retry_policy = RetryPolicy(self.config)
        self.held: list[ev.Deliver] = []
        """What is not shown yet: the decode node may still refuse."""
        self.told_again: set[tuple[NodeId, AttemptId]] = set()
        """Who was told twice that an attempt is given up."""

    # -- asking for a place ------------------------------------------------------------------------------------

    def place(self, now: float) -> None:
        self.phase = "placing"
        self.resume_at = math.inf
        id_ = attempt_id(self.spec.request, self.spec.choice, self.attempts)
        self.attempts += 1
        self.attempt = Attempt(id_, self.order.next_index)
        self.attempt.began_s = now
        left, avoid = self.left(now), self.retry_policy.avoided(now)
        request = place_request(self.spec, id_, self.order.tokens, left, avoid, self.retry_policy.retry)
        self.commands.append(ev.AskPlace(request))

    # -- showing tokens ----------------------------------------------------------------------------------------

    def deliver(self, command: ev.Deliver) -> None:
        """It is shown by `show`, in order."""
        self.held.append(command)

    def show(self) -> None:
        """From now on the answer is never refused: show what was held."""
        if self.held:
            self.commands += self.held
            self.held.clear()

    # -- giving an attempt up ----------------------------------------------------------------------------------

    def lose(self, now: float, why: str) -> None:
        error = WireError("unavailable", why)
        if self.retry_policy.lost():
            self.fail(error)
        else:
            self.try_again(now, error)

    def try_again(self, now: float, error: WireError) -> None:
        """Cancel the attempt and place the rest of the answer anew, perhaps after a pause."""
        self.drop_attempt(error.message or error.code)
        self.show()
        pause = self.retry_policy.failed(error)
        if pause or self.bus_down:
            self.phase = "waiting"
            self.resume_at = now + pause
        else:
            self.place(now)

    def drop_attempt(self, reason: str, all_but: NodeId = "") -> None:
        attempt, self.attempt = self.attempt, None
        self.order.forget_early()
        if attempt is not None:
            holders = [node for node in attempt.holders(self.phase) if node != all_but]
            self.commands += [ev.Cancel(node, attempt.id, reason) for node in holders]

    # -- ending ------------------------------------------------------------------------------------------------

    def finish_short(self) -> None:
        """No node holds a longer sequence: the answer ends here."""
        self.drop_attempt("no node has KV memory for more")
        self.finish("length", self.order.next_index)

    def finish(self, reason: End, tokens: int) -> None:
        self.show()
        self.end("finished")
        cached = self.cached_tokens or 0
        self.commands.append(ev.Finish(reason, self.spec.prompt_tokens, tokens, cached))

    def fail(self, error: WireError) -> None:
        self.drop_attempt(error.message or error.code)
        self.end("failed")
        self.commands.append(ev.Fail(error))

    def end(self, outcome: str) -> None:
        self.phase = "ended"
        self.outcome = outcome
        self.attempt = None

    # -- timers and laws ---------------------------------------------------------------------------------------

    def next_timer(self) -> float:
        """When time alone will next matter; infinity if never."""
        if self.phase in ("new", "ended"):
            return math.inf
        if self.phase == "waiting":
            return min(self.deadline, self.resume_at)
        if self.phase == "running" and not self.bus_down:
            return min(self.deadline, self.current().quiet_until(self.config))
        return self.deadline

    def left(self, now: float) -> float:
        return self.deadline - now if now < self.deadline else 0.0

    def current(self) -> Attempt:
        assert self.attempt is not None, f"no attempt in {self.phase}"
        return self.attempt

    def check(self) -> None:
        self.order.check()
        assert (self.phase == "ended") == bool(self.outcome)
        assert (self.attempt is not None) == (self.phase in ("placing", "reserving", "submitting", "running"))
        assert self.cached_tokens is None or 0 <= self.cached_tokens < self.spec.prompt_tokens
        assert self.attempt is None or self.attempt.first_index <= self.order.next_index
        assert self.phase == "ended" or self.order.next_index < self.spec.max_new_tokens
