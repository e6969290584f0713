"""`tsukimi simulate` as it is typed: what is wrong is said before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.worlds.traces import dialogues
from tsukimi.cli import app


def typed(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", "--interpreted", *map(str, arguments)])
    return result.exit_code, result.output + str(result.exception or "")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(dialogues(20)))
    return path


def test_results_tell_which_trace_and_how(trace: Path, tmp_path: Path) -> None:
    code, said = typed(trace, "--speed", "2", "--requests", "10", "--json", tmp_path / "out.json")
    assert code == 0, said
    told = json.loads((tmp_path / "out.json").read_bytes())
    assert (told["trace"]["path"], told["trace"]["speed"], told["trace"]["requests"]) == (
        "trace.jsonl",
        2.0,
        10,
    )
    assert len(told["trace"]["sha256"]) == 64
    assert told["requests"] == 10


def test_a_folder_that_is_not_there_is_told_before_the_run(trace: Path, tmp_path: Path) -> None:
    code, said = typed(trace, "--json", tmp_path / "none" / "out.json")
    assert code != 0
    assert "no folder" in said
    assert "simulated in" not in said


def test_an_empty_trace_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    code, said = typed(tmp_path / "empty")
    assert code != 0
    assert "no request" in said


def test_long_idle_time_costs_nothing(tmp_path: Path) -> None:
    rows = [
        {"timestamp": at, "input_length": 100, "output_length": 3, "hash_ids": [i]}
        for i, at in enumerate((1.7e12, 1.7e12 + 1e14))
    ]
    (tmp_path / "idle").write_text("\n".join(json.dumps(row) for row in rows))
    code, said = typed(tmp_path / "idle")
    assert code == 0, said
    assert "2 of 2" in said


def test_decode_nodes_can_do_it_alone(trace: Path) -> None:
    code, said = typed(trace, "--prefill", "0", "--decode", "3")
    assert code == 0, said
    assert "20 of 20" in said
