"""The experiments of the papers: those that can be compared agree with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.worlds.traces import CONVERSATION, dialogues, needs_conversation_trace
from tsukimi.reproduce.all import EXPERIMENTS
from tsukimi.reproduce.experiment import Inputs, Result, Row, draw
from tsukimi.reproduce.fig9 import fig9, table1
from tsukimi.reproduce.fig14 import fig14
from tsukimi.reproduce.made_trace import agent_rows
from tsukimi.reproduce.pools import lru_hits
from tsukimi.simulate.trace import TraceRow


def row(*ids: int, tail: int = 0) -> TraceRow:
    return TraceRow(0, 512 * len(ids) - tail, 1, ids)


def test_fig_14_within_five_percent() -> None:
    result = fig14(Inputs(Path("none")))
    assert len(result.rows) == 10
    assert all(r.off is not None and abs(r.off) < 0.05 for r in result.rows)


def test_a_hit_is_a_leading_run_and_the_least_recent_block_goes() -> None:
    rows = [row(1, 2), row(1, 2, 3), row(9, 2)]
    assert lru_hits(rows, 100, 512)[0] == pytest.approx(2 / 7)
    rows = [row(1, 2), row(3), row(1, 2)]
    assert lru_hits(rows, 3, 512)[0] == pytest.approx(2 / 5)
    assert lru_hits(rows, 2, 512)[0] == 0.0


def test_no_more_tokens_are_hit_than_there_are() -> None:
    rows = [row(1, 2, tail=500), row(1, 2, tail=500)]
    assert lru_hits(rows, 10, 512)[1] == pytest.approx(0.5)


@needs_conversation_trace
def test_the_conversation_trace_has_its_known_hit_rates() -> None:
    """Counted by another implementation."""
    known = (0.045, 0.211, 0.326, 0.355, 0.364, 0.366)
    assert [r.ours for r in table1(Inputs(CONVERSATION)).rows] == pytest.approx(known, abs=0.002)
    tokens = {r.what: r.ours for r in fig9(Inputs(CONVERSATION)).rows}
    assert list(tokens.values()) == pytest.approx([0.054, 0.086, 0.210, 0.291, 0.371], abs=0.002)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_gives_a_table_and_maybe_a_picture(tmp_path: Path, name: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"\n".join(dialogues(30)))
    result = EXPERIMENTS[name](Inputs(trace, quick=True))
    assert result.name == name
    assert result.rows
    draw(result, tmp_path / "picture.png")
    drawn = (tmp_path / "picture.png").exists()
    assert drawn == (result.picture is not None)


def test_what_the_paper_does_not_say_is_compared_with_nothing() -> None:
    assert Row("a", 2.0).off is None
    assert Row("a", 2.0, 1.0).off == pytest.approx(1.0)
    assert Result("n", "t", "s", "u", []).picture is None


def test_the_trace_of_our_making_is_its_seed_and_shares_prefixes() -> None:
    rows = agent_rows(400)
    assert rows == agent_rows(400)
    assert rows != agent_rows(400, seed=8)
    assert [r.timestamp for r in rows] == sorted(r.timestamp for r in rows)
    assert all(len(r.hash_ids) == -(-r.input_length // 512) for r in rows)
    assert 0.3 < lru_hits(rows, 1 << 40, 512)[1] < 0.9
