from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.core.kv.block_keys import KEY_BYTES
from tsukimi.simulate.trace import TRACE_BLOCK_TOKENS, TraceRequest
from tsukimi.traffic.trace_rows import Prompts, ScaledTrace, as_simulated, scale_rows

IDS = range(10, 500)


def request(number: int, *ids: int, tail: int = 100, output: int = 64) -> TraceRequest:
    keys = tuple(i.to_bytes(KEY_BYTES, "big") for i in ids)
    prompt = len(ids) * TRACE_BLOCK_TOKENS + tail
    return TraceRequest(number, 10.0 + number, prompt, output, keys)


def scaled(*requests: TraceRequest, scale: float = 1 / 32, context: int = 2048) -> ScaledTrace:
    return scale_rows(requests, scale, kv_block_tokens=16, context_tokens=context, most_output_tokens=1 << 20)


def shared(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=2, max_size=6))
def test_prompts_share_whole_blocks_exactly_where_their_rows_do(paths: list[list[int]]) -> None:
    # an id stands for everything before it, so ids are made from paths
    rows = [
        request(n, *(hash(tuple(path[: i + 1])) & 0xFFFF_FFFF for i in range(len(path))))
        for n, path in enumerate(paths)
    ]
    trace = scaled(*rows)
    prompts = Prompts(trace, ids=IDS, salt="x")
    tokens = [prompts.of(row) for row in trace.rows]
    for a in range(len(rows)):
        for b in range(a):
            common = sum(
                1
                for i in range(min(len(rows[a].block_keys), len(rows[b].block_keys)))
                if rows[a].block_keys[: i + 1] == rows[b].block_keys[: i + 1]
            )
            assert shared(tokens[a], tokens[b]) // 16 == common


def test_lengths_are_scaled_and_never_zero() -> None:
    trace = scaled(request(0, 1, 2, tail=320, output=64), request(1, tail=1, output=1))
    first, second = trace.rows
    assert (trace.prompt_tokens(first), first.output_tokens) == (2 * 16 + 10, 2)
    assert (trace.prompt_tokens(second), second.output_tokens) == (1, 1)
    assert [row.arrival_s for row in trace.rows] == [0.0, 1.0]
    assert trace.cut == 0


def test_what_does_not_fit_the_context_loses_blocks_at_its_end() -> None:
    trace = scaled(request(0, *range(100), output=320), context=128)
    (row,) = trace.rows
    assert trace.cut == 1
    assert trace.prompt_tokens(row) + row.output_tokens <= 128
    assert row.blocks == request(0, *range(100)).block_keys[: len(row.blocks)]
    assert row.blocks


def test_another_salt_shares_nothing_and_no_forbidden_id_is_drawn() -> None:
    trace = scaled(request(0, 1, 2, 3))
    one = Prompts(trace, ids=IDS, avoid=(11, 12), salt="a").of(trace.rows[0])
    again = Prompts(trace, ids=IDS, avoid=(11, 12), salt="a").of(trace.rows[0])
    other = Prompts(trace, ids=IDS, avoid=(11, 12), salt="b").of(trace.rows[0])
    assert one == again
    assert shared(one, other) < 16
    assert not {11, 12} & set(one)
    assert set(one) <= set(IDS)


def test_the_simulator_gets_the_same_lengths_and_the_same_sharing() -> None:
    rows = (request(0, 1, 2, tail=1024), request(1, 1, 2, 3, tail=1024), request(2, 9))
    trace = scaled(*rows, scale=1 / 8)
    assert trace.block_tokens == 64
    simulated = as_simulated(trace, speed=2.0)
    assert [r.prompt_tokens for r in simulated] == [trace.prompt_tokens(row) for row in trace.rows]
    assert [len(r.block_keys) for r in simulated] == [r.prompt_tokens // 16 for r in simulated]
    assert simulated[0].block_keys[:8] == simulated[1].block_keys[:8]
    assert not set(simulated[0].block_keys[8:]) & set(simulated[1].block_keys)
    assert not set(simulated[2].block_keys) & set(simulated[0].block_keys)
    assert [r.arrival_s for r in simulated] == [0.0, 0.5, 1.0]
