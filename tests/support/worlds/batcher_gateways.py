"""The gateways of a batching machine under random load.

Arrivals, lengths, shared prefixes, cancels and redeliveries are random; gateways die and restart, and the bus
fails for a while. A request that is moved, or refused with a retryable error, is placed again a few times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from shared.core.kv.block_keys import TOKEN_BYTES, blocks_for
from shared.core.machine import BusFound, BusLost
from shared.core.worker import events as w
from shared.core.worker.transfers import LandingArrived
from shared.protocol.errors import WireError
from shared.protocol.requests import BlockSource, PrefillJob, ReserveRequest, TokenDelta
from shared.protocol.sampling import SamplingParams
from tests.support.worlds.batcher_accounts import Account
from tests.support.worlds.workers import BLOCK, EOS, TARGET, job, reserve, source

if TYPE_CHECKING:
    from tests.support.worlds.batcher_life import Life

HEARTBEAT_S = 0.3
MOST_TRIES = 6
REFUSED_FOR_NOW = ("overloaded", "unavailable")
REFUSED_FOR_GOOD = ("too_large", "cancelled")


class Gateway(Struct, eq=False):
    name: str
    lives: int = 1
    alive: bool = True

    @property
    def life(self) -> str:
        return f"{self.name}/{self.lives}"


class Request(Struct, eq=False):
    name: str
    gateway: Gateway
    gateway_life: str
    text: list[int]
    """The prompt and the answer so far."""
    left: int
    sampling: SamplingParams
    tries: int = 0
    moves: int = 0
    answered: int = 0
    attempt: str = ""
    message: PrefillJob | ReserveRequest | None = None
    ended: str = ""

    def hear(self, tokens: tuple[int, ...]) -> None:
        self.text = self.text + list(tokens)
        self.answered += len(tokens)
        self.left -= len(tokens)


class Gateways:
    def __init__(self, life: Life) -> None:
        self._life = life
        rng, tokens = life.rng, life.machine.pool.total * BLOCK
        self._all = [Gateway(f"gateway-{i}") for i in range(3)]
        self._heads = [[rng.randrange(90) for _ in range(tokens)] for _ in range(3)]
        """Shared prefixes that prompts begin with."""
        self._tbt_limit_s = rng.choice((0.0, 0.0, 1e-4))
        self._arrival_s = rng.choice((0.02, 0.06, 0.3))
        self._requests: list[Request] = []
        self._open: dict[str, Request] = {}
        """Attempt placed or being placed -> its request."""

    # -- placing -------------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        if self._life.draining:
            return
        rng = self._life.rng
        self._life.at(rng.expovariate(1 / self._arrival_s), self.arrive)
        gateway = rng.choice(self._all)
        if not gateway.alive:
            return
        most = self._life.machine.pool.total * BLOCK
        length = rng.randint(1, most + 8) if rng.random() < 0.1 else rng.randint(1, max(2, most // 3))
        shared = rng.randrange(length) if rng.random() < 0.6 else 0
        text = rng.choice(self._heads)[:shared]
        text = text + [rng.randrange(90) for _ in range(length - len(text))]
        sampling = SamplingParams(eos_token_ids=(EOS,), ignore_eos=rng.random() < 0.5)
        wanted = rng.choice((1, 2, rng.randint(1, 30), rng.randint(20, 90)))
        request = Request(f"r{len(self._requests)}", gateway, gateway.life, text, wanted, sampling)
        self._requests.append(request)
        self._life.outcomes["arrived"] += 1
        self.place(request)
        if rng.random() < 0.15:
            self._life.at(rng.expovariate(3.0), lambda: self.cancel(request))

    def place(self, request: Request) -> None:
        if request.ended:
            return
        if request.tries == MOST_TRIES:
            self.end(request, "gave up")
            return
        request.tries += 1
        request.attempt = f"{request.name}/0/{request.tries}"
        if self._life.rng.random() < 0.01:
            self._life.feed(w.AttemptCancelled(request.attempt))  # the cancel overtakes its job
        request.message = self.message(request)
        self._open[request.attempt] = request
        self.submit(request)

    def message(self, request: Request) -> PrefillJob | ReserveRequest:
        rng = self._life.rng
        full = len(request.text) // BLOCK
        sources: tuple[BlockSource, ...] = ()
        if full and rng.random() < 0.5:
            cut = rng.randint(1, full)
            sources = (source(0, cut), source(rng.randint(0, cut), full))
        fields: dict[str, Any] = {
            "gateway": request.gateway.name, "gateway_incarnation": request.gateway_life,
            "max_new_tokens": request.left, "first_index": request.answered, "sampling": request.sampling,
            "budget_s": rng.choice((0.0, 0.3, 2.0)),
        }  # fmt: skip
        if rng.random() < 0.3:
            fields["pool"] = None
        if self._life.role == "prefill":
            target = TARGET if rng.random() < 0.8 else None
            return job(request.attempt, request.text, handoff=target, sources=sources, **fields)
        local = rng.random() < 0.4
        fields["tbt_limit_s"] = self._tbt_limit_s
        fields["moves"] = request.moves
        return reserve(request.attempt, request.text, local=local, sources=sources, **fields)

    def submit(self, request: Request) -> None:
        message = request.message
        assert message is not None
        asked = w.JobSubmitted if isinstance(message, PrefillJob) else w.ReserveAsked
        self._life.feed(asked(message, self._life.ask()))  # type: ignore[arg-type]
        if self._life.rng.random() < 0.05:  # redelivered
            self._life.at(self._life.rng.expovariate(5.0), lambda: self.redeliver(message))

    def redeliver(self, message: PrefillJob | ReserveRequest) -> None:
        asked = w.JobSubmitted if isinstance(message, PrefillJob) else w.ReserveAsked
        over = (
            message.attempt in self._life.accounts.all
            and message.attempt not in self._life.machine.attempts()
        )
        self._life.feed(asked(message, self._life.ask()))  # type: ignore[arg-type]
        assert not (over and message.attempt in self._life.machine.attempts()), "it came back to life"

    def answered(self, event: w.JobSubmitted | w.ReserveAsked, replies: list[w.Reply]) -> None:
        assert [r.ask for r in replies] == [event.ask], f"{event} was answered {len(replies)} times"
        answer = replies[0].message
        message = event.job if isinstance(event, w.JobSubmitted) else event.request
        request = self._open.get(message.attempt)
        if message.attempt in self._life.accounts.all:
            return
        if isinstance(answer, WireError):
            if request is not None:
                self.refused(request, answer)
            return
        # `request` may be None: the attempt may have been refused and then redelivered.
        self._life.accounts.accepted(account(message))
        self._life.outcomes["accepted"] += 1
        if isinstance(message, PrefillJob) or message.local is not None:
            self._life.accounts.got_ready(message.attempt, self._life.machine.attempts())

    def refused(self, request: Request, error: WireError) -> None:
        del self._open[request.attempt]
        self._life.outcomes[f"refused: {error.code}"] += 1
        assert error.code in REFUSED_FOR_NOW + REFUSED_FOR_GOOD, error
        if error.code in REFUSED_FOR_GOOD or self._life.draining:
            self.end(request, error.code)
        else:
            self._life.at(self._life.rng.expovariate(5.0), lambda: self.place(request))

    def landed(self, event: LandingArrived) -> None:
        """KV has landed: the gateway has the first token from the prefill node."""
        self._life.accounts.landed(event.attempt)
        request = self._open.get(event.attempt)
        if request is not None:
            request.hear((event.first_token,))

    def handed_over(self, attempt: str) -> None:
        self._life.accounts.all[attempt].handed_over = True
        request = self._open.pop(attempt, None)
        if request is not None:
            self.end(request, "handed over")

    def hear(self, gateway: str, delta: TokenDelta) -> None:
        self._life.accounts.told(delta)
        if delta.finish is not None:
            self._life.outcomes[f"said: {delta.finish} {delta.error}".strip()] += 1
        request = self._open.get(delta.attempt)
        if request is None:
            return
        assert gateway == request.gateway.name
        request.hear(delta.tokens[request.answered - delta.index :])
        if delta.finish is None:
            return
        del self._open[delta.attempt]
        if delta.finish == "moved" and not self._life.draining and request.left > 0:
            request.moves += 1
            self._life.at(self._life.rng.expovariate(20.0), lambda: self.place(request))
        else:
            self.end(request, delta.finish)

    def cancel(self, request: Request) -> None:
        if request.ended:
            return
        self.end(request, "cancelled")
        attempt = request.attempt
        self._open.pop(attempt, None)
        self._life.accounts.cancelled(attempt, live=attempt in self._life.machine.attempts())
        self._life.tell(w.AttemptCancelled(attempt))
        assert attempt not in self._life.machine.attempts()

    def end(self, request: Request, why: str) -> None:
        assert not request.ended
        request.ended = why
        self._life.outcomes[f"request: {why}"] += 1

    # -- coming and going ----------------------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        self._life.at(HEARTBEAT_S, self.heartbeat)
        for gateway in self._all:
            if gateway.alive:
                self._life.feed(w.GatewaySeen(gateway.name, gateway.life))

    def upset(self) -> None:
        """Either a gateway dies and comes back, at once or after its lease, or the bus is down for a while."""
        self._life.at(self._life.rng.expovariate(0.3), self.upset)
        gateway = self._life.rng.choice(self._all)
        chance = self._life.rng.random()
        if chance < 0.2:
            self._life.feed(BusLost())
            self._life.at(1.5, lambda: self._life.tell(BusFound()))
        elif gateway.alive:
            gateway.alive = False
            for request in list(self._requests):
                if request.gateway is gateway and not request.ended:
                    self.end(request, "owner lost")
                    self._open.pop(request.attempt, None)
            self._life.accounts.life_over(gateway.life)
            self._life.at(self._life.rng.choice((0.01, 3.0)), lambda: self.come_back(gateway))

    def come_back(self, gateway: Gateway) -> None:
        old = gateway.life
        gateway.lives += 1
        gateway.alive = True
        self._life.feed(w.GatewaySeen(gateway.name, gateway.life))
        for attempt in self._life.machine.attempts():
            assert self._life.accounts.all[attempt].owner != old, f"{attempt} outlives its owner"

    def close(self) -> None:
        """At the end of the machine's life: check that no request is still taken to be on the node."""
        assert not self._open, f"forgotten: {sorted(self._open)}"
        for request in self._requests:
            if not request.ended:
                self.end(request, "gave up")  # it was waiting to be placed again


def account(message: PrefillJob | ReserveRequest) -> Account:
    if isinstance(message, PrefillJob):
        need, tokens = blocks_for(len(message.tokens) // TOKEN_BYTES, BLOCK), 1
    else:
        tokens = message.max_new_tokens
        need = tokens - 1 + (blocks_for(message.prompt_tokens, BLOCK) if message.local else 0)
    return Account(message.attempt, message.gateway_incarnation, need, tokens, message.first_index)
