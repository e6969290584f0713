"""More answers than a decode node has memory for: some give way and come back, and all of them end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.worker.transfers import LandingArrived, PoolWriteEnded
from shared.protocol.requests import Reserved
from tests.support.worlds.workers import Bench, decode_bench, prompt_of, reserve

PROMPT = 6


class Owner:
    """Places one answer again and again, until it is whole."""

    def __init__(self, name: str, answer: int) -> None:
        self.name = name
        self.text = prompt_of(PROMPT)
        self.left = answer
        self.moves = 0
        self.attempt = ""
        self.said = 0

    def follow(self, bench: Bench) -> None:
        if not self.left:
            return
        if self.attempt:
            deltas = [d for d in bench.deltas if d.attempt == self.attempt]
            tokens = [t for d in deltas for t in d.tokens]
            if not any(d.finish for d in deltas):
                return
            assert deltas[-1].finish in ("moved", "length"), deltas[-1]
            self.hear(tokens)
            self.moves += deltas[-1].finish == "moved"
            self.attempt = ""
        if self.left:
            self.place(bench)

    def hear(self, tokens: list[int]) -> None:
        self.text = self.text + tokens
        self.left -= len(tokens)

    def place(self, bench: Bench) -> None:
        attempt = f"{self.name}/{self.moves}"
        request = reserve(attempt, self.text, max_new_tokens=self.left, moves=self.moves, pool=None)
        answer = bench.answer(request)
        if not isinstance(answer, Reserved):
            assert answer.code == "overloaded", answer
            return
        self.attempt = attempt
        bench.do(LandingArrived(attempt, 1))
        if self.left:
            self.hear([1])  # the prefill node said it


def run(owners: list[Owner], pages: int) -> Bench:
    bench = decode_bench(pages=pages, headroom_tokens=0, max_running=8, max_waiting=8, chunk_tokens=64)
    for _ in range(3000):
        for owner in owners:
            owner.follow(bench)
        if all(not o.left for o in owners):
            return bench
        if bench.step is not None:
            bench.run()
        for attempt in list(bench.machine._table.known):
            if bench.machine._table.known[attempt].pool_open:
                bench.do(PoolWriteEnded(attempt))
    raise AssertionError(f"left: {[(o.name, o.left, o.moves) for o in owners]}")


def test_eight_long_answers_in_memory_for_three_all_end() -> None:
    owners = [Owner(f"r{i}", 40) for i in range(8)]
    bench = run(owners, pages=36)
    assert bench.machine.counters["preempted"] > 0
    assert max(o.moves for o in owners) <= 8


@settings(deadline=None)
@given(answers=st.lists(st.integers(1, 60), min_size=1, max_size=8), pages=st.integers(17, 60))
def test_whatever_the_lengths_all_end(answers: list[int], pages: int) -> None:
    run([Owner(f"r{i}", n) for i, n in enumerate(answers)], pages)
