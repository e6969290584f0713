"""A prefill and a decode machine in a small world where everything takes a while, in any order, and may go wrong.

Pages have content: the row of each position is a digest of all tokens up to it, and the fake engine derives each token
from the rows it reads back. KV that is wrong, stale or of another sequence therefore changes the text. Each request has
an owner that follows its tokens by index and, like a gateway, places the rest again when the attempt is moved.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from shared.core.kv.block_keys import extend_chain, pack_tokens, root_key, unpack_tokens
from shared.core.machine import Ticked
from shared.core.worker import events as w
from shared.core.worker.decode import DecodeMachine
from shared.core.worker.prefill import PrefillMachine
from shared.core.worker.steps import RunStep, SequenceResult, SequenceStep, StepDone, StepFailed
from shared.core.worker.transfers import (
    AbortStreams,
    BlocksFetched,
    CloseLanding,
    CommitHandoff,
    CommitPoolWrite,
    FetchBlocks,
    HandoffEnded,
    LandingArrived,
    LandingClosed,
    LandingFailed,
    OpenHandoff,
    OpenLanding,
    OpenPoolWrite,
    PoolWriteEnded,
    SendBlocks,
)
from shared.protocol.requests import HandoffTarget, TokenDelta
from tests.support.worlds.workers import BLOCK, NAMESPACE, decode_bench, prefill_bench

if TYPE_CHECKING:
    from tests.support.worlds.worker_owner import Owner

Row = tuple[int, bytes]
"""(token, digest of all tokens up to it)."""
Block = list[Row | None]
VOCABULARY = 90
SLOW = 0.15


def next_row(before: bytes, token: int) -> Row:
    return token, blake2b(before + token.to_bytes(4, "little"), digest_size=8).digest()


def drawn(rows: list[Row | None]) -> int:
    digest = blake2b(b"".join(row[1] if row else b"?" for row in rows), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def reference(prompt: list[int], count: int) -> list[int]:
    """The answer that must come out."""
    rows: list[Row | None] = []
    before, answer = b"", []
    for token in prompt:
        row = next_row(before, token)
        rows.append(row)
        before = row[1]
    for _ in range(count):
        token = drawn(rows)
        answer.append(token)
        row = next_row(before, token)
        rows.append(row)
        before = row[1]
    return answer


def ignored(message: Any) -> None:
    """Ignores a second answer to the same question."""


class Lane:
    """Things that happen in this order. Different lanes progress in any order."""

    def __init__(self, haste: float = 1.0) -> None:
        self.work: deque[Callable[[], None]] = deque()
        self.haste = haste
        """Probability that the lane advances when it is picked."""


class Stream:
    """What one attempt writes to one peer."""

    def __init__(self, pages: tuple[int, ...], first_block: int = 0) -> None:
        self.pages = pages
        self.first_block = first_block
        self.sent: set[int] = set()
        self.lane = Lane(SLOW)
        self.closed = False


class Landing:
    def __init__(self, attempt: str, pages: tuple[int, ...]) -> None:
        self.attempt = attempt
        self.pages = pages
        self.got: set[int] = set()


class Node:
    """A machine with pages, an engine and streams."""

    def __init__(self, world: World, machine: PrefillMachine | DecodeMachine) -> None:
        self.world = world
        self.machine = machine
        self.pages: dict[int, Block] = {p: [None] * BLOCK for p in range(machine.pool.total)}
        self.handoffs: dict[str, tuple[Stream, HandoffTarget]] = {}
        self.puts: dict[str, tuple[Stream, OpenPoolWrite]] = {}
        self.engine = Lane()
        self.drained = False

    def feed(self, event: Any) -> None:
        commands = self.machine.handle(event, self.world.now)
        self.machine.check()
        for command in commands:
            self.execute(command)
        if self.world.rng.random() < self.world.trouble / 4 and not isinstance(
            event, w.JobSubmitted | w.ReserveAsked
        ):
            self.world.later(Lane(), lambda: self.feed(event))  # fed twice, the second time late

    def execute(self, command: Any) -> None:
        world = self.world
        match command:
            case RunStep():
                world.later(self.engine, lambda: self.run(command))
            case FetchBlocks():
                world.later(Lane(SLOW), lambda: self.fetch(command))
            case OpenHandoff(attempt, target, pages):
                self.handoffs[attempt] = (Stream(pages), target)
            case OpenPoolWrite(attempt, _, _, first_block, _, pages):
                self.puts[attempt] = (Stream(pages, first_block), command)
            case SendBlocks():
                for block in range(command.first_block, command.first_block + command.blocks):
                    self.send(command.attempt, block, command.to_handoff, command.to_pool)
            case CommitHandoff():
                self.commit_handoff(command)
            case CommitPoolWrite(attempt):
                self.end_put(attempt, True)
            case AbortStreams():
                if command.handoff:
                    self.end_handoff(command.attempt)
                if command.pool:
                    self.end_put(command.attempt, False)
            case OpenLanding(attempt, landing, pages):
                world.landings[landing] = Landing(attempt, pages)
            case CloseLanding(attempt, landing):
                world.later(Lane(SLOW), lambda: self.close_landing(attempt, landing))
            case w.SendTokens():
                if world.lucky():
                    for delta in command.deltas:
                        world.later(Lane(), lambda d=delta: world.told(self, d))
            case w.Reply(ask, message):
                world.later(Lane(), lambda: world.asks.pop(ask, ignored)(message))
            case w.Drained():
                self.drained = True

    # -- engine ------------------------------------------------------------------------------------------------

    def run(self, command: RunStep) -> None:
        if not self.world.lucky():
            for s in command.sequences:
                self.write(s, garbage=True)
            self.feed(StepFailed(command.step, "engine trouble"))
            return
        results = []
        for s in command.sequences:
            self.write(s)
            rows = self.rows(s, s.start + s.tokens)
            results.append(SequenceResult(s.attempt, (drawn(rows),) if s.sample else ()))
        self.feed(StepDone(command.step, tuple(results), 1, 0.01))

    def rows(self, s: SequenceStep, end: int) -> list[Row | None]:
        return [self.pages[s.pages[p // BLOCK]][p % BLOCK] for p in range(end)]

    def write(self, s: SequenceStep, garbage: bool = False) -> None:
        before = self.rows(s, s.start)[-1] if s.start else None
        digest = before[1] if before else b""
        ids = unpack_tokens(s.token_ids)
        assert len(ids) == s.tokens
        for position, token in enumerate(ids, s.start):
            row = next_row(digest, token)
            digest = row[1]
            self.pages[s.pages[position // BLOCK]][position % BLOCK] = (
                (token, b"garbage!") if garbage else row
            )
        for block in range(s.start // BLOCK, (s.start + s.tokens - 1) // BLOCK + 1):
            self.send(s.attempt, block, True, True)

    # -- transfers ---------------------------------------------------------------------------------------------

    def fetch(self, command: FetchBlocks) -> None:
        most = len(command.keys) if self.world.lucky() else self.world.rng.randrange(len(command.keys))
        got = 0
        for key, page in zip(command.keys[:most], command.pages, strict=False):
            content = self.world.cache.get(key)
            if content is None:
                break
            self.pages[page] = list(content)
            got += 1
        error = "" if got == len(command.keys) else "missing"
        self.feed(BlocksFetched(command.attempt, command.source.first_block, got, error, 0.001, command.turn))

    def send(self, attempt: str, block: int, to_handoff: bool, to_pool: bool) -> None:
        if to_handoff and attempt in self.handoffs:
            stream, target = self.handoffs[attempt]
            if not stream.closed:
                self.world.later(stream.lane, lambda: self.world.write_landing(self, stream, target, block))
        if to_pool and attempt in self.puts:
            self.puts[attempt][0].sent.add(block)

    def commit_handoff(self, command: CommitHandoff) -> None:
        stream, target = self.handoffs[command.attempt]
        stream.closed = True

        def arrive() -> None:
            del self.handoffs[command.attempt]
            landing = self.world.landings.pop(target.landing, None)
            decode = self.world.decode
            if landing is None:
                self.feed(HandoffEnded(command.attempt, False, "the landing is fenced"))
            elif len(landing.got) < command.blocks or not self.world.lucky():
                decode.feed(LandingFailed(landing.attempt, "a block is corrupt"))
                self.feed(HandoffEnded(command.attempt, False, "a block is corrupt"))
            else:
                decode.feed(
                    LandingArrived(
                        landing.attempt, command.first_token, command.first_logprob, command.cached_tokens
                    )
                )
                self.feed(HandoffEnded(command.attempt, True))

        self.world.later(stream.lane, arrive)

    def end_handoff(self, attempt: str) -> None:
        stream, target = self.handoffs[attempt]
        stream.closed = True

        def aborted() -> None:
            del self.handoffs[attempt]
            landing = self.world.landings.pop(target.landing, None)
            if landing is not None:
                self.world.decode.feed(LandingFailed(landing.attempt, "the writer gave up"))
            self.feed(HandoffEnded(attempt, False, "aborted"))

        self.world.later(stream.lane, aborted)

    def end_put(self, attempt: str, commit: bool) -> None:
        stream, command = self.puts[attempt]

        def ended() -> None:
            del self.puts[attempt]
            stored = 0
            if commit and self.world.lucky():
                for i, key in enumerate(command.keys):
                    if stream.first_block + i in stream.sent:
                        stored += self.world.store(command.keys, i, key, self.pages[stream.pages[i]])
            self.feed(PoolWriteEnded(attempt, stored))

        self.world.later(stream.lane, ended)

    def close_landing(self, attempt: str, landing: bytes) -> None:
        if self.world.landings.pop(landing, None) is not None:
            self.feed(LandingClosed(attempt))


class World:
    """`trouble`: the probability that a single thing goes wrong."""

    def __init__(self, seed: int, trouble: float, pages: int = 24) -> None:
        self.rng = random.Random(seed)
        self.trouble = trouble
        self.now = 0.0
        self.lanes: list[Lane] = []
        self.cache: dict[bytes, Block] = {}
        self.landings: dict[bytes, Landing] = {}
        self.asks: dict[int, Callable[[Any], None]] = {}
        self.asked = 0
        self.owners: list[Owner] = []
        fields: dict[str, Any] = {"pages": pages, "gateway_lease_s": 1e9, "reservation_lease_s": 1e9}
        decode = decode_bench(headroom_tokens=3, **fields).machine
        del fields["reservation_lease_s"]
        self.prefill = Node(self, prefill_bench(**fields).machine)
        self.decode = Node(self, decode)

    def lucky(self) -> bool:
        return self.rng.random() >= self.trouble

    def later(self, lane: Lane, work: Callable[[], None]) -> None:
        lane.work.append(work)
        if len(lane.work) == 1:
            self.lanes.append(lane)

    def ask(self, node: Node, event: Callable[[int], Any], then: Callable[[Any], None]) -> None:
        self.asked += 1
        ask = self.asked
        self.asks[ask] = then
        self.later(Lane(), lambda: node.feed(event(ask)))

    def told(self, node: Node, delta: TokenDelta) -> None:
        for owner in self.owners:
            owner.hear(delta)

    def write_landing(self, writer: Node, stream: Stream, target: HandoffTarget, block: int) -> None:
        """Write directly into the reserved pages. Only the landing's fence stops this."""
        landing = self.landings.get(target.landing)
        if landing is not None:
            self.decode.pages[landing.pages[block]] = list(writer.pages[stream.pages[block]])
            landing.got.add(block)

    def store(self, keys: tuple[bytes, ...], i: int, key: bytes, content: Block) -> int:
        """Store a block if it is absent. Its content must match its key."""
        tokens = [row[0] if row else -1 for row in content]
        assert -1 not in tokens, "an incomplete block was offered"
        parent = keys[i - 1] if i else root_key(NAMESPACE)
        assert extend_chain(parent, pack_tokens(tokens), BLOCK) == [key], "a block under another's key"
        assert all(row is not None and row[1] != b"garbage!" for row in content), (
            "a void step's block was stored"
        )
        if key in self.cache:
            assert self.cache[key] == content, "equal keys, other KV"
            return 0
        self.cache[key] = list(content)
        return 1

    def step(self) -> bool:
        """Let one of the due things happen. Returns False if nothing is due."""
        if not self.lanes:
            return False
        while True:
            at = self.rng.randrange(len(self.lanes))
            lane = self.lanes[at]
            if self.rng.random() < lane.haste:
                break
        work = lane.work[0]
        self.now += 0.001
        lane.work.popleft()
        if not lane.work:
            self.lanes[at] = self.lanes[-1]
            self.lanes.pop()
        work()
        return True

    def run(self, most: int = 60_000) -> None:
        """Run until every request has ended and nothing is under way."""
        for _ in range(most):
            if self.step():
                continue
            self.now += 1.0
            for node in (self.prefill, self.decode):
                node.feed(Ticked())
            for owner in self.owners:
                owner.look_after()
            if not self.lanes:
                return
        raise AssertionError(f"not at rest: {[(o.name, o.done, o.attempts) for o in self.owners]}")
