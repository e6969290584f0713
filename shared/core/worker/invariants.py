"""What must hold between two events in every worker machine. Raises AssertionError, saying what is wrong."""

from __future__ import annotations

from collections import Counter

from shared.core.kv.pool import BlockPool
from shared.core.worker.attempts import AttemptTable, S
from shared.core.worker.computing.inflight_step import InflightStep
from shared.core.worker.config import WorkerConfig


def check_pages(table: AttemptTable[S], pool: BlockPool, block_tokens: int) -> None:
    """Each page is held once for each known sequence that has it, and holds what was computed."""
    pool.check()
    held = Counter(page for s in table.known.values() for page in s.pages)
    for page in range(pool.total):
        refs = pool.refs_of(page)
        assert refs == held[page], f"page {page} is held {refs} times, known of are {held[page]}"
    for attempt, s in table.known.items():
        room = len(s.pages) * block_tokens
        assert s.ended or s.computed <= room, f"{attempt}: {s.computed} computed in room for {room}"


def check_attempts(table: AttemptTable[S], worker: WorkerConfig) -> None:
    """Every accepted attempt is live or has ended, once."""
    for attempt, s in table.known.items():
        assert s.ended == (attempt not in table.live), f"{attempt}: ended is {s.ended}"
        assert not (s.ended and s.quiet), f"{attempt} has ended, is quiet and was not forgotten"
        assert not (s.farewell and not s.ended), f"{attempt} is live and given up"
        assert s.computed <= s.wanted, f"{attempt}: {s.computed} computed of {s.wanted}"
    assert set(table.live) <= set(table.known)
    assert set(table.waiting) | set(table.active) <= set(table.live)
    assert not set(table.waiting) & set(table.active), "an attempt waits and runs"
    assert table.leases.attempts() == set(table.live), "leases and live attempts differ"
    wanted = sum(s.wanted for s in table.live.values())
    assert table.tokens == wanted, f"{table.tokens} tokens counted, {wanted} found"
    ended = sum(v for name, v in table.counters.items() if name.startswith("ended_"))
    assert table.counters["accepted"] == ended + len(table.live), "accepted attempts were lost"
    assert len(table.ended_answers) <= worker.remember_attempts


def check_step(table: AttemptTable[S], inflight: InflightStep[S]) -> None:
    """Just the sequences of the step that is out are marked so."""
    in_step = {s.attempt for s, _ in inflight.out or ()}
    for attempt, s in table.known.items():
        assert s.in_step == (attempt in in_step), f"{attempt}: in_step is {s.in_step}"
    assert in_step <= set(table.known), "a sequence in a step was forgotten"
