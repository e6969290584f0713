"""`tsukimi bench serve` on a whole cluster of the toy engine, as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes.launched import Launched, launched

SMALL = ("--kv-memory", "64M", "--pool-memory", "64M")
LOAD = ("bench", "serve", "--requests", "12", "--input-tokens", "200", "--output-tokens", "8", "--ignore-eos")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    with launched(tmp_path_factory.mktemp("load") / "run", "--model", "toy:step_ms=2", *SMALL) as running:
        yield running


@pytest.mark.parametrize("how", [("--concurrency", "4"), ("--rate", "50", "--seed", "3")])
def test_load_on_a_cluster(cluster: Launched, tmp_path: Path, how: tuple[str, str]) -> None:
    file = tmp_path / "load.json"
    said = cluster.tsukimi(*LOAD, *how, "--ttft-slo-s", "60", "--json", str(file))
    report = json.loads(file.read_text())
    assert "12 of 12 requests completed" in said
    assert (report["completed"], report["failures"], report["output_tokens"]) == (12, {}, 96)
    assert report["goodput"]["share"] == 1.0
    assert report["uncounted"] == 0
    for sample in report["samples"]:
        assert 150 <= sample["prompt_tokens"] <= 250
        assert sample["completion_tokens"] == 8
        assert sample["finish"] == "length"
    cluster.wait_idle()


def test_predictions_are_held_against_what_was_measured(cluster: Launched) -> None:
    cluster.tsukimi(*LOAD, "--rate", "50", "--seed", "4")
    cluster.wait_idle()
    families = {f.name: f for f in text_string_to_metric_families(httpx.get(f"{cluster.url}/metrics").text)}
    errors = families["tsukimi_prediction_error_seconds"].samples
    counted = {
        stage: sum(s.value for s in errors if s.name.endswith("_count") and s.labels["stage"] == stage)
        for stage in ("queue", "transfer", "prefill", "ttft", "tbt")
    }
    assert counted["queue"] == counted["transfer"] == counted["prefill"] == counted["ttft"] >= 12
    assert 12 <= counted["tbt"] <= counted["ttft"], "answers of one or two tokens have none"
    measured = families["tsukimi_measured_seconds"].samples
    by_stage = {
        stage: sum(s.value for s in measured if s.labels["stage"] == stage)
        for stage in ("queue", "transfer", "prefill", "ttft")
    }
    assert 0.0 < by_stage["prefill"] < by_stage["ttft"]
    assert by_stage["queue"] + by_stage["transfer"] + by_stage["prefill"] <= by_stage["ttft"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "wrong"), "wrong"),
        (("--url", "http://127.0.0.1:1"), "nobody answers at http://127.0.0.1:1"),
    ],
)
def test_what_can_not_work_is_one_sentence(cluster: Launched, arguments: tuple[str, ...], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tsukimi", *LOAD, *arguments, "--run-dir", str(cluster.run_dir)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
