"""Prompts that share a prefix and come together: it is computed once, whatever becomes of the one that computes it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.worker import events as w
from shared.core.worker.transfers import CommitHandoff
from tests.support.worlds.workers import (
    BLOCK,
    Bench,
    decode_bench,
    end_transfers,
    job,
    only,
    prefill_bench,
    prompt_of,
    reserve,
)

PREFIX = 8 * BLOCK


def with_tail(i: int, tail: int = 3) -> list[int]:
    return prompt_of(PREFIX) + prompt_of(tail, salt=i + 1)


def attempts(bench: Bench) -> list[str]:
    return [s.attempt for s in bench.step.sequences] if bench.step is not None else []


def run_step(bench: Bench, **fields: Any) -> None:
    """With the hand-overs that it begins."""
    for commit in only(bench.run(**fields), CommitHandoff):
        end_transfers(bench, commit.attempt)


def run_all(bench: Bench) -> None:
    for _ in range(100):
        if bench.step is None:
            return
        run_step(bench)
    raise AssertionError("it does not end")


def test_prompts_that_come_together_compute_their_prefix_once() -> None:
    bench = prefill_bench(chunk_tokens=16, max_running=4, pages=200)
    for i in range(4):
        bench.submit(job(f"r{i}", with_tail(i)))
    assert attempts(bench) == ["r0"]
    run_all(bench)
    assert bench.machine.counters["prompt_tokens_computed"] == PREFIX + 4 * 3
    assert bench.machine.counters["cached_tokens"] == 3 * PREFIX


def test_another_prompt_does_not_wait() -> None:
    bench = prefill_bench(chunk_tokens=200, max_running=4, pages=200)
    bench.submit(job("first", prompt_of(5, salt=9)))
    bench.submit(job("a", with_tail(0)))
    bench.submit(job("b", with_tail(1)))
    bench.submit(job("other", prompt_of(PREFIX, salt=5)))
    bench.run()
    assert attempts(bench) == ["a", "other"]


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_who_waits_goes_on_when_the_one_it_waits_for_is_gone(how: str) -> None:
    bench = prefill_bench(chunk_tokens=16, max_running=4, pages=200)
    bench.submit(job("a", with_tail(0)))
    bench.submit(job("b", with_tail(1)))
    bench.submit(job("c", with_tail(2)))
    if how == "cancelled":
        bench.do(w.AttemptCancelled("a", "gone"))  # in its first step, whose blocks are kept
        run_step(bench)
    else:
        run_step(bench)
        run_step(bench, errors=("a",))
    assert attempts(bench) == ["b"], "c waits for b now"
    run_all(bench)
    computed = bench.machine.counters["prompt_tokens_computed"]
    assert computed <= PREFIX + 2 * BLOCK * 4 + 3 * 3
    assert bench.deltas[-1].tokens


def test_a_decode_node_that_prefills_joins_too() -> None:
    bench = decode_bench(chunk_tokens=16, pages=200)
    for i in range(3):
        bench.submit(reserve(f"r{i}", with_tail(i), local=True, max_new_tokens=3))
    for _ in range(40):
        if bench.step is None:
            break
        bench.run()
    assert bench.machine.counters["prompt_tokens_computed"] == PREFIX + 3 * 3
    assert {d.attempt for d in bench.deltas if d.finish} == {"r0", "r1", "r2"}


@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 8), st.integers(1, 9)), min_size=1, max_size=6
    ),
    cancel=st.lists(st.integers(0, 5), max_size=3),
)
def test_everybody_gets_a_first_token_or_was_cancelled(
    prompts: list[tuple[int, int, int]], cancel: list[int]
) -> None:
    bench = prefill_bench(chunk_tokens=8, max_running=3, pages=400)
    for i, (salt, blocks, tail) in enumerate(prompts):
        bench.submit(job(f"r{i}", prompt_of(blocks * BLOCK, salt=salt) + prompt_of(tail, salt=20 + i)))
    for i in cancel:
        bench.do(w.AttemptCancelled(f"r{i}", "gone"))
        if bench.step is not None:
            run_step(bench)
    run_all(bench)
    first = {d.attempt for d in bench.deltas if d.tokens}
    assert {f"r{i}" for i in range(len(prompts)) if i not in cancel} <= first
