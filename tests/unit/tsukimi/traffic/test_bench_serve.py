"""Load on a real socket: what is sent, what is counted, and what is said when nothing works."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.support.processes.pacing_server import MODEL, PacingServer, Plan, pacing_server
from tsukimi.cli import app
from tsukimi.errors import ToolError
from tsukimi.traffic.bench_serve import bench_serve
from tsukimi.traffic.settings import Load, arrivals

SMALL: dict[str, Any] = {"requests": 6, "input_tokens": 40, "output_tokens": 3}


def measured(server: PacingServer, folder: Path, **fields: Any) -> tuple[dict[str, Any], str]:
    """The report of a run, as its file has it, and what was printed."""
    out = io.StringIO()
    load = Load(model="", **SMALL | fields)
    bench_serve(server.url, "", load, folder / "load.json", Console(file=out, width=160))
    return dict(json.loads((folder / "load.json").read_text())), out.getvalue()


def test_answers_at_a_known_pace(tmp_path: Path) -> None:
    with pacing_server(first_s=0.05, gap_s=0.02) as server:
        report, said = measured(server, tmp_path, warmup=2, concurrency=3)
    assert len(server.bodies) == 2 + 6
    assert report["load"]["model"] == MODEL
    assert (report["completed"], report["failures"]) == (6, {})
    assert report["output_tokens"] == 18
    assert [s["number"] for s in report["samples"]] == list(range(6))
    for sample in report["samples"]:
        assert sample["ttft_s"] >= 0.05
        assert len(sample["gaps_s"]) == 2
        assert sample["ttft_s"] + sum(sample["gaps_s"]) >= 0.09
        assert sample["seconds"] >= sample["ttft_s"] + sum(sample["gaps_s"])
        assert abs(sample["prompt_tokens"] - 40) <= 6, "a word is two tokens here, and five are around them"
    assert "6 of 6 requests completed" in said


def test_a_closed_loop_keeps_just_so_many_in_flight(tmp_path: Path) -> None:
    with pacing_server(gather=3) as server:
        measured(server, tmp_path, warmup=0, concurrency=3, requests=9)
    assert server.most_in_flight == 3
    assert len({body["prompt"] for body in server.bodies}) == 9, "no two prompts alike"


def test_an_open_loop_sends_on_whether_it_is_answered_or_not(tmp_path: Path) -> None:
    with pacing_server(gather=6) as server:  # answers nobody before all have asked
        report, _ = measured(server, tmp_path, warmup=0, rate=50.0, seed=11)
    assert server.most_in_flight == 6
    assert [s["due_s"] for s in report["samples"]] == arrivals(50.0, 6, 11)


def test_failures_are_counted_apart_by_what_they_are(tmp_path: Path) -> None:
    plans = {
        1: Plan(status=429), 2: Plan(error="internal"), 3: Plan(cut=True), 4: Plan(texts=()), 5: Plan(status=429),
    }  # fmt: skip
    with pacing_server(lambda number: plans.get(number, Plan())) as server:
        report, said = measured(server, tmp_path, warmup=0, concurrency=1)
    assert report["completed"] == 1
    assert report["failures"] == {
        "429 overloaded": 2, "in the answer: internal": 1, "cut short": 1, "no text": 1,
    }  # fmt: skip
    assert report["output_tokens"] == 3
    assert report["ttft_s"]["p99"] == report["samples"][0]["ttft_s"]
    assert report["samples"][2]["error"] == "the gateway ended the answer: lost it"
    assert "5 failed" in said


def test_chunks_of_several_tokens_and_no_usage(tmp_path: Path) -> None:
    with pacing_server(lambda number: Plan(texts=("a b ", "c d "), tokens=4, usage=number > 0)) as server:
        report, said = measured(server, tmp_path, warmup=0, requests=2, concurrency=1)
    assert (report["output_tokens"], report["uncounted"]) == (2 + 4, 1)
    assert "1 answers came without usage" in said


def test_the_key_and_what_peers_may_refuse_are_sent_when_asked_for() -> None:
    with pacing_server() as server:
        load = Load(model=MODEL, **SMALL, ignore_eos=True, chat=True)
        bench_serve(server.url + "/v1/", "secret", load, None, Console(file=io.StringIO()))
    assert server.keys == {"Bearer secret"}
    assert all(body["ignore_eos"] and body["messages"] for body in server.bodies)


def test_no_success_is_an_error_and_the_samples_are_kept(tmp_path: Path) -> None:
    with (
        pacing_server(lambda number: Plan(status=503)) as server,
        pytest.raises(ToolError, match=r"no request succeeded: 6 x 503 overloaded. The first: .*later"),
    ):
        measured(server, tmp_path, warmup=0)
    assert len(json.loads((tmp_path / "load.json").read_text())["samples"]) == 6


def test_a_failed_warm_up_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    with (
        pacing_server(lambda number: Plan(status=503)) as server,
        pytest.raises(ToolError, match=r"the warm-up request failed: .*503"),
    ):
        measured(server, tmp_path)
    assert len(server.bodies) == 1


def test_a_wrong_model_is_said_in_the_servers_words() -> None:
    with pacing_server() as server, pytest.raises(ToolError, match="404: the model wrong does not exist"):
        bench_serve(server.url, "", Load(model="wrong", **SMALL), None, Console(file=io.StringIO()))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[", "http://"])
@pytest.mark.parametrize("model", ["", "m"])
def test_nobody_there_is_a_sentence(url: str, model: str) -> None:
    with pytest.raises(ToolError):
        bench_serve(url, "", Load(model=model, **SMALL), None, Console(file=io.StringIO()))


def test_the_command() -> None:
    arguments = ["bench", "serve", "--requests", "3", "--input-tokens", "9", "--output-tokens", "4"]
    with pacing_server() as server:
        done = CliRunner().invoke(
            app, [*arguments, "--url", server.url, "--rate", "100", "--ttft-slo-s", "60"]
        )
    assert done.exit_code == 0, done.output
    assert "open loop, 100 requests/s" in done.output
    assert "goodput % of sent" in done.output
    both = CliRunner().invoke(app, [*arguments, "--rate", "1", "--concurrency", "2"])
    assert isinstance(both.exception, ToolError)
    assert both.exception.exit_code == 2


def test_a_file_that_can_not_be_written_is_said_first(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="there is no folder"):
        bench_serve("http://127.0.0.1:1", "", Load(model="m"), tmp_path / "no" / "load.json", Console())
