"""Step plans: gaps are closed under a budget, nobody starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from shared.core.worker.computing.batching import chunk, plan_step

BLOCK = 4


class Row(Struct):
    prompt_tokens: int
    computed: int = 0
    wanted: int = 0


def prompt(tokens: int, computed: int = 0) -> Row:
    return Row(tokens, computed, tokens)


def decoding(tokens: int) -> Row:
    return Row(tokens, tokens + 2, tokens + 3)


def test_decode_rows_come_first_and_prompts_share_what_they_leave() -> None:
    a, b, c, d = prompt(10), decoding(5), prompt(6), decoding(7)
    plan = plan_step([a, b, c, d], chunk_tokens=16, block_tokens=BLOCK, max_rows=8)
    assert plan == [(b, 1), (d, 1), (a, 10), (c, 4)]


def test_chunks_end_on_a_block_boundary_except_the_last() -> None:
    row = prompt(11)
    sizes = []
    while row.computed < row.wanted:
        ((_, n),) = plan_step([row], chunk_tokens=6, block_tokens=BLOCK, max_rows=8)
        sizes.append(n)
        row.computed += n
    assert sizes == [4, 4, 3]


def test_prompts_go_first_come_first_served() -> None:
    first, second = prompt(100), prompt(2)
    assert plan_step([first, second], chunk_tokens=8, block_tokens=BLOCK, max_rows=8) == [(first, 8)]


def test_the_first_prompt_gets_a_block_however_many_decode() -> None:
    rows = [decoding(3) for _ in range(20)] + [prompt(9)]
    plan = plan_step(rows, chunk_tokens=8, block_tokens=BLOCK, max_rows=64)
    assert plan[-1] == (rows[-1], BLOCK)


def test_at_most_so_many_rows_the_first_ones() -> None:
    rows = [decoding(i) for i in range(1, 6)]
    plan = plan_step(rows, chunk_tokens=8, block_tokens=BLOCK, max_rows=3)
    assert [r for r, _ in plan] == rows[:3]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 32),
    st.integers(1, 12),
)
def test_laws_of_a_plan(rows: list[tuple[int, int, bool]], budget: int, most: int) -> None:
    made = [
        decoding(t) if decodes else prompt(t, min(blocks * BLOCK, (t - 1) // BLOCK * BLOCK))
        for t, blocks, decodes in rows
    ]
    plan = plan_step(made, chunk_tokens=budget, block_tokens=BLOCK, max_rows=most)
    assert plan, "something always moves"
    assert len(plan) <= most
    spent = 0
    for row, n in plan:
        assert 0 < n <= row.wanted - row.computed
        if row.computed + n < row.wanted:
            assert (row.computed + n) % BLOCK == 0
        spent += n
    assert spent <= max(budget, BLOCK) + len(made)
    planned = {id(row) for row, _ in plan}
    assert all(id(r) in planned for r in made[:most] if r.computed >= r.prompt_tokens)


def test_chunk_of_an_unaligned_budget() -> None:
    assert chunk(8, 30, 7, BLOCK) == 4
    assert chunk(8, 30, 3, BLOCK) == 0
    assert chunk(8, 11, 3, BLOCK) == 3
