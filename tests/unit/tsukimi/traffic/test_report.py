from __future__ import annotations

import io
import json

from rich.console import Console

from tsukimi.traffic.asking import Sample
from tsukimi.traffic.report import show, summarise, to_json
from tsukimi.traffic.settings import Load

LOAD = Load(model="m", requests=4)


def sample(
    number: int, sent_s: float, ttft_s: float, *gaps_s: float, tokens: int = 0, reason: str = ""
) -> Sample:
    return Sample(
        number, sent_s, sent_s, ttft_s + sum(gaps_s), ttft_s, gaps_s,
        prompt_tokens=100, completion_tokens=tokens or 1 + len(gaps_s), reason=reason,
    )  # fmt: skip


def test_failures_are_in_none_of_the_times() -> None:
    good = [sample(0, 0.0, 1.0, 0.1, 0.3), sample(1, 1.0, 3.0, 0.2, 0.2)]
    bad = [sample(2, 1.0, 90.0, 90.0, reason="cut short"), Sample(3, 2.0, 2.0, 0.01, reason="429 overloaded")]
    report = summarise("u", LOAD, good + bad)
    alone = summarise("u", LOAD, good)
    for name in ("ttft_s", "tbt_s", "tpot_s", "latency_s", "output_tokens", "prompt_tokens", "completed"):
        assert getattr(report, name) == getattr(alone, name), name
    assert report.failures == {"cut short": 1, "429 overloaded": 1}
    assert report.ttft_s == {"mean": 2.0, "p50": 1.0, "p90": 3.0, "p99": 3.0}
    assert alone.seconds == 4.4
    assert alone.output_tokens_per_s == 6 / 4.4
    assert alone.requests_per_s == 2 / 4.4


def test_chunks_with_several_tokens_are_one_gap_and_all_their_tokens() -> None:
    report = summarise("u", LOAD, [sample(0, 0.0, 1.0, 0.4, 0.4, tokens=9)])
    assert report.tbt_s is not None
    assert report.tpot_s is not None
    assert (report.tbt_s["mean"], report.tpot_s["mean"]) == (0.4, 0.1)
    assert (report.tokens_per_chunk, report.output_tokens) == (3.0, 9)


def test_a_server_without_usage_is_counted_by_chunks() -> None:
    bare = Sample(0, 0.0, 0.0, 2.0, 1.0, (0.5, 0.5))
    report = summarise("u", LOAD, [bare])
    assert (report.output_tokens, report.uncounted) == (3, 1)


def test_goodput_is_what_met_every_objective_of_all_that_was_sent() -> None:
    samples = [
        sample(0, 0.0, 0.5, *[0.1] * 9, 0.9),  # the longest tenth of the gaps is one gap
        sample(1, 0.0, 0.5, *[0.1] * 10),
        sample(2, 0.0, 1.5, *[0.1] * 10),
        sample(3, 0.0, 0.1, reason="silent"),
    ]
    both = summarise("u", Load(model="m", ttft_slo_s=1.0, tbt_slo_s=0.5), samples)
    assert both.goodput is not None
    assert both.goodput.share == 0.25
    assert both.goodput.requests_per_s == 0.25 * 4 / both.seconds
    first = summarise("u", Load(model="m", ttft_slo_s=1.0), samples)
    assert first.goodput is not None
    assert first.goodput.share == 0.5
    assert summarise("u", LOAD, samples).goodput is None


def test_the_table_and_the_file() -> None:
    samples = [sample(0, 0.0, 1.0, 0.05), Sample(1, 0.0, 0.2, 0.1, reason="429 overloaded", error="later")]
    report = summarise("http://peer", Load(model="m", requests=2, rate=3.0, ttft_slo_s=2.0), samples)
    out = io.StringIO()
    show(report, Console(file=out, width=160))
    said = out.getvalue()
    for part in (
        "m at http://peer: open loop, 3 requests/s", "TTFT s", "1.000", "TBT ms", "50.0", "latency s", "1.050",
        "output tokens/s", "goodput requests/s", "1 of 2 requests completed", "1 failed", "1 x 429 overloaded",
        "late to send a request by up to 0.20 s",
    ):  # fmt: skip
        assert part in said, part
    told = json.loads(to_json(report))
    assert [s["number"] for s in told["samples"]] == [0, 1]
    assert told["samples"][0]["gaps_s"] == [0.05]
    assert told["samples"][1]["error"] == "later"


def test_one_token_answers_have_no_time_between_tokens() -> None:
    report = summarise("u", LOAD, [sample(0, 0.0, 1.0)])
    assert report.tbt_s is None
    out = io.StringIO()
    show(report, Console(file=out))
    assert "TBT ms" in out.getvalue()
