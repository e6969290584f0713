"""The decode machine with tokens held back until an answer's last, as the simulator runs it."""

from __future__ import annotations

from shared.core.worker import events as w
from shared.protocol.sampling import SamplingParams
from tests.support.worlds.workers import Bench, decode_bench, land, prompt_of

TO_THE_END = SamplingParams(temperature=0.0, ignore_eos=True)


def holding(wanted: int, attempt: str = "a", **config: int) -> Bench:
    bench = decode_bench(stream_tokens=False, max_repeat=100, **config)
    land(bench, attempt, prompt_of(5), max_new_tokens=wanted, sampling=TO_THE_END, pool=None)
    return bench


def test_tokens_go_out_once_with_the_finish_and_none_is_missing() -> None:
    bench = holding(10)
    bench.run(7, repeats=3)
    assert bench.deltas == []
    bench.run(8, repeats=4)
    bench.run(9, repeats=2)
    (delta,) = bench.deltas
    assert (delta.index, delta.tokens, delta.finish) == (1, (7, 7, 7, 8, 8, 8, 8, 9, 9), "length")
    assert bench.machine.counters["tokens_generated"] == 9
    bench.idle()


def test_who_asks_is_told_all() -> None:
    bench = holding(10)
    bench.run(7, repeats=3)
    state = bench.sync("a", from_index=1)
    assert (state.state, state.delta.index, state.delta.tokens) == ("running", 1, (7, 7, 7))


def test_what_was_held_back_goes_out_when_the_sequence_is_given_up() -> None:
    bench = holding(50)
    bench.run(7, repeats=3)
    bench.do(w.DrainStarted(1.0))
    bench.run(8, repeats=1)
    bench.tick(2.0)
    while bench.step is not None:
        bench.run(8)
    (delta,) = bench.deltas
    assert (delta.index, delta.finish) == (1, "moved")
    assert delta.tokens[:4] == (7, 7, 7, 8)


def test_answers_that_may_end_early_are_never_held_back() -> None:
    bench = decode_bench(stream_tokens=False, max_repeat=100)
    land(bench, "a", prompt_of(5), max_new_tokens=10, pool=None)
    bench.run(7)
    assert bench.said("a") == [7]
