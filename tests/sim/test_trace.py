from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.protocol.errors import Invalid
from tests.support.worlds.traces import CONVERSATION, needs_conversation_trace
from tsukimi.simulate.trace import parse_trace, read_trace


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
        (line(timestamp=-1), "before the previous one"),
        (b'{"timestamp": 0}', "input_length"),
        (b"{not json", "line 3"),
    ],
)
def test_a_bad_row_is_named_by_its_line(bad: bytes, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        list(parse_trace([line(), b"", bad], name="t.jsonl"))
    assert "t.jsonl, line 3" in str(caught.value)
    assert problem in str(caught.value)


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
