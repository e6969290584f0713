from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from shared.protocol.errors import Invalid
from tests.support.worlds.traces import CONVERSATION, needs_conversation_trace
from tsukimi.simulate.shaping import with_most_output, with_poisson_arrivals
from tsukimi.simulate.trace import TraceFormat, doubts, parse_trace, read_trace


def line(**fields: object) -> bytes:
    row = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]} | fields
    return json.dumps(row).encode()


def test_a_row_becomes_a_request_with_keys_of_its_full_blocks() -> None:
    first, second = parse_trace([line(), b"\n", line(timestamp=4000, input_length=1024)], speed=2.0)
    assert (first.number, first.arrival_s, first.prompt_tokens, first.output_tokens) == (0, 0.0, 1000, 5)
    assert (second.number, second.arrival_s) == (1, 2.0)
    assert len(first.block_keys) == 1
    assert len(second.block_keys) == 2
    assert first.block_keys[0] == second.block_keys[0]


def test_64_bit_ids_are_kept_exactly() -> None:
    ids = [2**63 + 1, 2**32 + 7, 7, 2**64 - 1]
    (request,) = parse_trace([line(input_length=2048, hash_ids=ids)])
    assert [int.from_bytes(key, "big") for key in request.block_keys] == ids
    assert len(set(request.block_keys)) == 4


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (line(hash_ids=[1]), "1 hash_ids for 1000 tokens; there must be 2"),
        (line(hash_ids=[1, 2, 3]), "3 hash_ids"),
        (line(input_length=1025), "there must be 3"),
        (line(hash_ids=[1, 2**64]), "64-bit"),
        (line(hash_ids=[1, -1]), "64-bit"),
        (line(hash_ids=[1, 2.5]), "hash_ids"),
        (line(input_length=0, hash_ids=[]), "at least 1"),
        (line(output_length=0), "at least 1"),
        (line(output_length="7"), "output_length"),
        (line(timestamp=-1), "negative"),
        (line(input_length=1000, hash_ids=list(range(63))), "--block-tokens 16"),
        (line(hash_ids=[True, 2]), "hash_ids"),
        (line(timestamp="0"), "timestamp"),
        (b'{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "line 3"),
        (b'{"timestamp": 0}', "input_length"),
        (b"{not json", "line 3"),
    ],
)
def test_a_bad_row_is_named_by_its_line(bad: bytes, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_trace([line(), b"", bad], name="t.jsonl", requests=1)
    assert "t.jsonl, line 3" in str(caught.value)
    assert problem in str(caught.value)


def test_rows_out_of_order_are_named_or_sorted() -> None:
    rows = [line(timestamp=5000), line(timestamp=4000, input_length=700)]
    with pytest.raises(Invalid, match=r"line 2: timestamp 4000 is before the previous one; --sort"):
        parse_trace(rows)
    first, second = parse_trace(rows, form=TraceFormat(sort=True))
    assert (first.prompt_tokens, first.arrival_s) == (700, 0.0)
    assert (second.number, second.arrival_s) == (1, 1.0)


def test_time_begins_with_the_first_request_in_the_unit_that_is_said() -> None:
    rows = [line(timestamp=1.7e12), line(timestamp=1.7e12 + 500)]
    assert [r.arrival_s for r in parse_trace(rows)] == [0.0, 0.5]
    assert [r.arrival_s for r in parse_trace(rows, form=TraceFormat(time_unit="s"))] == [0.0, 500.0]
    assert [r.arrival_s for r in parse_trace(rows, form=TraceFormat(time_unit="us"))] == [0.0, 0.0005]


def test_seconds_taken_for_milliseconds_are_doubted() -> None:
    seconds = parse_trace([line(timestamp=i / 3) for i in range(100)])
    assert "--time-unit s" in doubts(seconds, 1.0, TraceFormat())
    right = TraceFormat(time_unit="s")
    assert not doubts(parse_trace([line(timestamp=i / 3) for i in range(100)], form=right), 1.0, right)
    fast = parse_trace([line(timestamp=300 * i) for i in range(100)], speed=1e6)
    assert not doubts(fast, 1e6, TraceFormat())


def test_blocks_of_another_length_are_said() -> None:
    form = TraceFormat(block_tokens=16)
    (request,) = parse_trace([line(input_length=40, hash_ids=[1, 2, 3])], form=form)
    assert len(request.block_keys) == 2


def test_a_gzipped_trace_and_one_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    rows = b"\r\n".join([line(), line(timestamp=9)])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows))
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + rows)
    for name in ("a.jsonl.gz", "b.jsonl"):
        assert len(read_trace(tmp_path / name)) == 2
    (tmp_path / "cut.gz").write_bytes(gzip.compress(rows)[:-9])
    with pytest.raises(Invalid, match="cut"):
        read_trace(tmp_path / "cut.gz")


@pytest.mark.parametrize("nothing", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_trace_is_invalid(nothing: bytes) -> None:
    with pytest.raises(Invalid, match="no request"):
        parse_trace([nothing])


def test_arrivals_may_be_drawn_anew_and_answers_cut() -> None:
    requests = parse_trace([line(timestamp=10 * i, output_length=i + 1) for i in range(2000)])
    drawn = with_poisson_arrivals(requests, 4.0, seed=1)
    assert drawn == with_poisson_arrivals(requests, 4.0, seed=1)
    assert drawn[-1].arrival_s == pytest.approx(500.0, rel=0.1)
    assert max(r.output_tokens for r in with_most_output(requests, 7)) == 7


def test_a_file_that_is_not_there_is_invalid(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="No such file"):
        read_trace(tmp_path / "none.jsonl")


@needs_conversation_trace
def test_the_conversation_trace_is_read_whole() -> None:
    requests = read_trace(CONVERSATION)
    assert len(requests) == 12_031
    assert sum(r.prompt_tokens for r in requests) / len(requests) == pytest.approx(12_035, abs=1)
    assert requests[-1].arrival_s == pytest.approx(3537, abs=3)
    assert len(read_trace(CONVERSATION, requests=10)) == 10
