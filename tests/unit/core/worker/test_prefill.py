"""The prefill machine, event by event."""

from __future__ import annotations

from typing import Any

import pytest

from shared.core.kv.block_events import PublishBlocks
from shared.core.worker import events as w
from shared.core.worker.transfers import (
    AbortStreams,
    BlocksFetched,
    CommitHandoff,
    CommitPoolWrite,
    FetchBlocks,
    HandoffEnded,
    OpenHandoff,
    OpenPoolWrite,
    PoolWriteEnded,
    SendBlocks,
)
from shared.protocol.errors import WireError
from shared.protocol.requests import Accepted
from tests.support.worlds.workers import (
    BLOCK,
    CACHE,
    EOS,
    GATEWAY,
    NAMESPACE,
    TARGET,
    end_transfers,
    job,
    keys_of,
    only,
    prefill_bench,
    prefilled,
    prompt_of,
    source,
)

# -- the way of a job --------------------------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_streamed_and_handed_over() -> None:
    bench = prefill_bench()
    prompt = prompt_of(13)
    commands = bench.submit(job("a", prompt, first_index=5))
    (handoff,) = only(commands, OpenHandoff)
    (write,) = only(commands, OpenPoolWrite)
    assert handoff.target == TARGET
    assert len(handoff.pages) == 4
    assert (write.pool, write.first_block, write.keys) == (CACHE, 0, keys_of(prompt))
    assert write.pages == handoff.pages[:3]
    assert bench.step is not None
    assert [(s.start, s.tokens, s.sample) for s in bench.step.sequences] == [(0, 8, None)]
    bench.run()
    assert [(s.start, s.tokens, s.sample is None) for s in bench.step.sequences] == [(8, 5, False)]
    commands = bench.run(token=42)
    assert commands[0] == w.SendTokens(GATEWAY, (bench.deltas[0],))
    delta = bench.deltas[0]
    assert (delta.attempt, delta.index, delta.tokens, delta.finish, delta.cached_tokens) == (
        "a",
        5,
        (42,),
        None,
        0,
    )
    assert only(commands, CommitHandoff) == [CommitHandoff("a", 4, 42, None, 0)]
    assert only(commands, CommitPoolWrite) == [CommitPoolWrite("a")]
    assert bench.machine.load(bench.now).attempts == ("a",)
    bench.do(HandoffEnded("a", True))
    assert bench.machine.pool.held == 4, "the pool write still reads the pages"
    bench.do(PoolWriteEnded("a", 3))
    bench.idle()
    assert bench.finish("a") is None


def test_step_carries_the_token_ids_and_pages() -> None:
    bench = prefill_bench(chunk_tokens=100)
    prompt = prompt_of(6)
    bench.submit(job("a", prompt))
    assert bench.step is not None
    (s,) = bench.step.sequences
    assert s.token_ids == job("a", prompt).tokens
    assert len(s.pages) == 2


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_last_token_is_always_computed(blocks: int, extra: int) -> None:
    bench = prefill_bench(chunk_tokens=100)
    prompt = prompt_of(blocks * BLOCK + extra)
    prefilled(bench, "cold", prompt)
    bench.submit(job("warm", prompt, sources=(source(0, 9),)))
    assert bench.step is not None
    (s,) = bench.step.sequences
    assert s.start == (len(prompt) - 1) // BLOCK * BLOCK
    assert s.start + s.tokens == len(prompt)
    assert s.tokens >= 1
    bench.run()
    (cold,), (warm,) = ([d for d in bench.deltas if d.attempt == a] for a in ("cold", "warm"))
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == s.start <= len(prompt) - 1


def test_cached_tokens_are_what_prefill_reused() -> None:
    bench = prefill_bench(chunk_tokens=100)
    prompt = prompt_of(12)
    prefilled(bench, "a", prompt)
    bench.submit(job("b", prompt))
    commit = only(bench.run(), CommitHandoff)[0]
    assert commit.cached_tokens == 8
    assert bench.deltas[-1].cached_tokens == 8
    assert bench.machine.counters["prompt_tokens_computed"] == 12 + 4


def test_prefix_from_own_memory_is_sent_before_the_rest_is_computed() -> None:
    bench = prefill_bench()
    prefilled(bench, "a", prompt_of(12))
    commands = bench.submit(job("b", prompt_of(12)))
    assert only(commands, SendBlocks) == [SendBlocks("b", 0, 2)]
    assert only(commands, FetchBlocks) == []


def test_what_own_memory_lacks_is_fetched_and_then_owned() -> None:
    bench = prefill_bench()
    prompt = prompt_of(18)
    prefilled(bench, "a", prompt[:8])
    commands = bench.submit(job("b", prompt, sources=(source(0, 4),)))
    (fetch,) = only(commands, FetchBlocks)
    assert fetch.source == source(2, 2)
    assert (fetch.namespace, fetch.keys) == (NAMESPACE, keys_of(prompt)[2:4])
    assert only(commands, OpenHandoff) == []
    assert bench.step is None
    commands = bench.do(BlocksFetched("b", 2, 2))
    (handoff,) = only(commands, OpenHandoff)
    assert handoff.pages[2:4] == fetch.pages
    assert only(commands, SendBlocks) == [SendBlocks("b", 0, 4)]
    (publish,) = only(commands, PublishBlocks)
    assert publish.stored == keys_of(prompt)[2:4]
    assert bench.step is not None
    assert [(s.start, s.tokens) for s in bench.step.sequences] == [(16, 2)]


def test_a_short_fetch_means_the_rest_is_computed() -> None:
    bench = prefill_bench(chunk_tokens=100)
    bench.submit(job("a", prompt_of(18), sources=(source(0, 4),)))
    bench.do(BlocksFetched("a", 0, 1, "evicted"))
    assert bench.step is not None
    assert [(s.start, s.tokens) for s in bench.step.sequences] == [(4, 14)]


def test_an_expired_source_is_recomputed_or_taken_elsewhere() -> None:
    bench = prefill_bench(chunk_tokens=100)
    other = source(0, 3, TARGET.decode)
    commands = bench.submit(job("a", prompt_of(18), sources=(source(0, 4), other, source(3, 1))))
    commands = bench.do(BlocksFetched("a", 0, 0, "expired"))
    (fetch,) = only(commands, FetchBlocks)
    assert (fetch.source, fetch.turn) == (other, 2)
    assert bench.do(BlocksFetched("a", 0, 0, "expired")) == [], "told again, while the next one is out"
    (fetch,) = only(bench.do(BlocksFetched("a", 0, 3, turn=2)), FetchBlocks)
    assert fetch.source == source(3, 1)
    bench.do(BlocksFetched("a", 3, 0, "gone", turn=3))
    assert bench.step is not None
    assert [(s.start, s.tokens) for s in bench.step.sequences] == [(12, 6)]


def test_a_prefix_computed_by_a_neighbour_meanwhile_is_used() -> None:
    bench = prefill_bench(chunk_tokens=8)
    bench.submit(job("a", prompt_of(9)))
    bench.submit(job("b", prompt_of(9)))
    bench.run()
    assert bench.step is not None
    assert [(s.attempt, s.start, s.tokens) for s in bench.step.sequences] == [("a", 8, 1), ("b", 8, 1)]


def test_several_short_prompts_share_a_step_and_one_token_message() -> None:
    bench = prefill_bench(chunk_tokens=100)
    bench.submit(job("x", prompt_of(3)))
    for i in range(3):
        bench.submit(job(f"a{i}", prompt_of(5, i + 1)))
    bench.run()
    commands = bench.run()
    (send,) = only(commands, w.SendTokens)
    assert [d.attempt for d in send.deltas] == ["a0", "a1", "a2"]


# -- ends --------------------------------------------------------------------------------------------------------------


def test_eos_first_finishes_without_a_handover() -> None:
    bench = prefill_bench()
    bench.submit(job("a", prompt_of(5)))
    commands = bench.run(token=EOS)
    assert (bench.said("a"), bench.finish("a")) == ([EOS], "stop")
    assert only(commands, CommitHandoff) == []
    assert only(commands, AbortStreams) == [AbortStreams("a", handoff=True, pool=False)]
    assert only(commands, CommitPoolWrite) == [CommitPoolWrite("a")]
    end_transfers(bench, "a", ok=False)
    bench.idle()
    assert bench.finish("a") == "stop"


def test_one_wanted_token_never_transfers() -> None:
    bench = prefill_bench()
    commands = bench.submit(job("a", prompt_of(5), max_new_tokens=1)) + bench.run()
    assert only(commands, OpenHandoff) == only(commands, CommitHandoff) == []
    assert (bench.said("a"), bench.finish("a")) == ([1], "length")
    bench.do(PoolWriteEnded("a", 1))
    bench.idle()


def test_no_target_means_only_the_first_token_is_wanted() -> None:
    bench = prefill_bench()
    bench.submit(job("a", prompt_of(5), handoff=None, pool=None))
    bench.run()
    assert bench.finish("a") == "length"
    bench.idle()


def test_a_failed_handover_moves_the_attempt_once() -> None:
    bench = prefill_bench()
    bench.submit(job("a", prompt_of(5), first_index=2))
    bench.run()
    bench.do(HandoffEnded("a", False, "block 1 is corrupt"))
    last = bench.deltas[-1]
    assert (last.index, last.tokens, last.finish, last.error) == (3, (), "moved", "block 1 is corrupt")
    bench.do(HandoffEnded("a", False))
    bench.do(PoolWriteEnded("a"))
    bench.idle()


def test_a_handover_lost_while_computing_moves_the_attempt_and_keeps_what_was_computed() -> None:
    bench = prefill_bench()
    bench.submit(job("a", prompt_of(13)))
    commands = bench.do(HandoffEnded("a", False, "connection lost"))
    assert bench.finish("a") == "moved"
    assert only(commands, CommitPoolWrite) == [], "the step still writes into the pages"
    commands = bench.run()
    assert only(commands, CommitPoolWrite) == [CommitPoolWrite("a")]
    bench.do(PoolWriteEnded("a", 2))
    bench.idle()
    assert bench.machine.pool.cached == 2


@pytest.mark.parametrize("moment", ["waiting", "fetching", "computing", "committed"])
def test_a_cancel_frees_everything_at_every_moment(moment: str) -> None:
    bench = prefill_bench(max_running=1)
    if moment == "waiting":
        bench.submit(job("b", prompt_of(5, 3)))
    bench.submit(job("a", prompt_of(13), sources=(source(0, 2),) if moment == "fetching" else ()))
    if moment == "committed":
        bench.run()
        bench.run()
    bench.do(w.AttemptCancelled("a", "client gone"))
    assert "a" not in bench.machine.load(bench.now).attempts
    if moment == "waiting":
        prefill_rest = bench.run()
        assert only(prefill_rest, CommitHandoff)
        end_transfers(bench, "b")
    elif moment == "fetching":
        assert bench.machine.pool.held == 4
        bench.do(BlocksFetched("a", 0, 2))
    else:
        assert bench.machine.pool.held == 4
        if moment == "computing":
            assert only(bench.run(), AbortStreams)
        end_transfers(bench, "a", ok=False)
    bench.idle()
    assert bench.finish("a") is None


def test_a_cancel_that_overtakes_its_job_is_remembered() -> None:
    bench = prefill_bench()
    bench.do(w.AttemptCancelled("a"))
    assert bench.answer(job("a", prompt_of(5))).code == "cancelled"
    assert bench.sync("a").state == "unknown"
    bench.idle()


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"incarnation": "life-0"}, "unavailable"),
        ({"namespace": b"x" * 16}, "refused"),
        ({"block_keys": ()}, "invalid"),
        ({"max_new_tokens": 0}, "invalid"),
        ({"prompt_tokens": 7}, "invalid"),
    ],
)
def test_what_can_not_be_served_is_refused(fields: dict[str, Any], code: str) -> None:
    bench = prefill_bench()
    error = bench.answer(job("a", prompt_of(6), **fields))
    assert isinstance(error, WireError)
    assert error.code == code
    bench.idle()


def test_foreign_kv_is_refused_loudly() -> None:
    bench = prefill_bench()
    error = bench.answer(job("a", prompt_of(6), namespace=b"bfloat16" * 2))
    assert error.code == "refused"
    assert "dtype" in error.message


def test_what_can_never_fit_is_refused_and_others_go_on() -> None:
    bench = prefill_bench(pages=4)
    assert bench.answer(job("huge", prompt_of(17))).code == "too_large"
    assert bench.answer(job("fits", prompt_of(16))) == Accepted("fits")
    assert bench.step is not None


def test_the_context_bounds_a_prompt() -> None:
    bench = prefill_bench(context_tokens=8)
    assert bench.answer(job("a", prompt_of(8))).code == "too_large"
    assert bench.answer(job("b", prompt_of(7))) == Accepted("b")


def test_a_full_queue_answers_overloaded_with_a_computed_pause() -> None:
    bench = prefill_bench(max_running=1, max_waiting=1)
    for name in ("a", "b"):
        assert bench.answer(job(name, prompt_of(9))) == Accepted(name)
    error = bench.answer(job("c", prompt_of(9)))
    assert error.code == "overloaded"
    assert error.retry_after_s is not None
    assert error.retry_after_s > 0
    assert bench.machine.load(bench.now).attempts == ("a", "b")


def test_a_job_delivered_twice_runs_once() -> None:
    bench = prefill_bench(chunk_tokens=100)
    for _ in range(2):
        assert bench.answer(job("a", prompt_of(6))) == Accepted("a")
    assert bench.machine.load(bench.now).attempts == ("a",)
    bench.run()
    end_transfers(bench, "a")
    assert bench.answer(job("a", prompt_of(6))) == Accepted("a")
    assert bench.step is None
    bench.idle()


# -- pages -------------------------------------------------------------------------------------------------------------


def test_jobs_wait_for_pages_in_order() -> None:
    bench = prefill_bench(pages=5, chunk_tokens=100)
    for name, tokens in (("a", 16), ("b", 12), ("c", 1)):
        bench.submit(job(name, prompt_of(tokens, ord(name))))
    load = bench.machine.load(bench.now)
    assert (load.running, load.waiting) == (1, 2)
    assert load.queue_s > 0
    bench.run()
    assert bench.step is None, "the pages of a are still read"
    end_transfers(bench, "a")
    assert bench.step is not None
    assert [s.attempt for s in bench.step.sequences] == ["b", "c"]


def test_cached_blocks_make_room() -> None:
    bench = prefill_bench(pages=4)
    prefilled(bench, "a", prompt_of(16))
    assert bench.machine.pool.cached == 4
    commands = bench.submit(job("b", prompt_of(16, 1)))
    (publish,) = only(commands, PublishBlocks)
    assert set(publish.removed) == set(keys_of(prompt_of(16)))
