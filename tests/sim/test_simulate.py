from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.core.conductor.machine import ConductorMachine
from shared.core.costs.model import compute_s
from shared.core.costs.presets import PRESETS
from tests.support.worlds.traces import CONVERSATION, dialogues, needs_conversation_trace
from tsukimi.simulate.cluster import SimulatedCluster
from tsukimi.simulate.config import SimulationConfig
from tsukimi.simulate.report import report
from tsukimi.simulate.trace import parse_trace, read_trace

POLICIES = ("random", "load_balance", "cache_aware", "kvcache_centric")


def simulated(lines: list[bytes], speed: float = 1.0, **config: Any) -> SimulatedCluster:
    config = {"prefill": 4, "decode": 4} | config
    cluster = SimulatedCluster(SimulationConfig(**config), list(parse_trace(lines, speed=speed)))
    cluster.run()
    cluster.check()
    return cluster


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    return list(dialogues(400))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_and_nothing_is_left(lines: list[bytes], policy: str) -> None:
    cluster = simulated(lines, policy=policy)
    result = report(cluster)
    assert (result["completed"], result["rejected"], result["failed"]) == (400, 0, 0)
    assert result["output_tokens"] == sum(r.output_tokens for r in cluster.requests)
    assert result["prompt_tokens"] == sum(r.prompt_tokens for r in cluster.requests)
    computed = sum(n["prompt_tokens_computed"] for n in result["nodes"].values())
    assert computed + result["cached_tokens"] == result["prompt_tokens"]
    assert sum(n["prompt_tokens_computed"] for name, n in result["nodes"].items() if "decode" in name) == 0
    assert result["network_bytes"] >= sum(
        r.prompt_tokens * 327_680 for r in cluster.requests if r.output_tokens > 1
    )


def test_better_policies_answer_sooner(lines: list[bytes]) -> None:
    mean = {p: report(simulated(lines, policy=p))["ttft_s"]["mean"] for p in POLICIES}
    assert mean["random"] > mean["load_balance"] > mean["cache_aware"] > mean["kvcache_centric"]


def test_reruns_are_bit_identical_in_any_process(tmp_path: Path, lines: list[bytes]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"\n".join(lines[:150]))
    results = []
    for i, hash_seed in enumerate(("0", "1", "random")):
        out = tmp_path / f"{i}.json"
        program = (
            "import typer; from tsukimi.simulate.command import simulate; app = typer.Typer(); "
            "app.command()(simulate); app()"
        )
        args = [
            str(trace),
            "--policy",
            "kvcache_centric",
            "--prefill",
            "3",
            "--decode",
            "2",
            "--json",
            str(out),
        ]
        subprocess.run(
            [sys.executable, "-c", program, *args],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            timeout=120,
        )
        results.append(out.read_bytes())
    assert results[0] == results[1] == results[2]
    assert b'"completed": 150' in results[0]


def ten_blocks(at_ms: int) -> bytes:
    ids = b"[1,2,3,4,5,6,7,8,9,10]"
    return b'{"timestamp": %d, "input_length": 5000, "output_length": 2, "hash_ids": %s}' % (at_ms, ids)


def test_blocks_are_hit_only_once_they_exist() -> None:
    """The requests are 1 ms apart. Who recomputes hits nothing; who waits has its first token after the other's."""
    recomputing = simulated([ten_blocks(0), ten_blocks(1)], prefill=2, policy="load_balance")
    waiting = simulated([ten_blocks(0), ten_blocks(1)], prefill=2)
    assert report(recomputing)["cached_tokens"] == 0
    assert report(waiting)["cached_tokens"] == 9 * 512
    first_s, second_s = (waiting.measures._ttft_s[number] for number in (0, 1))
    assert second_s > first_s
    assert report(simulated([ten_blocks(0), ten_blocks(60_000)], prefill=2))["cached_tokens"] == 9 * 512


@pytest.mark.parametrize("chunk_tokens", [512, 131_072])
def test_who_is_behind_on_the_same_node_waits_for_the_blocks_it_hits(chunk_tokens: int) -> None:
    """The requests are 1 ms apart. The second reuses blocks the first must still compute, so it waits for them."""
    cluster = simulated(
        [ten_blocks(0), ten_blocks(1)],
        prefill=1, decode=1, keep_blocks=True, max_prefills=4, chunk_tokens=chunk_tokens,
    )  # fmt: skip
    first_s, second_s = (cluster.measures._ttft_s[number] for number in (0, 1))
    assert report(cluster)["cached_tokens"] == 9 * 512
    cost = PRESETS[cluster.config.cost]
    own_s = compute_s(cost, 9 * 512, 5000 - 9 * 512)
    assert second_s + 0.001 >= first_s + own_s * 0.999


def test_objectives_refuse_under_overload_and_are_kept(lines: list[bytes]) -> None:
    free = report(simulated(lines, speed=30.0, kv_tokens=9_000_000, ttft_slo_s=5.0))
    assert 0.0 < free["goodput"] < 1.0  # measured, though nothing is refused
    held = report(simulated(lines, speed=30.0, kv_tokens=9_000_000, ttft_slo_s=5.0, admission="early"))
    assert free["rejected"] == 0
    assert free["ttft_s"]["p90"] > 5.0
    assert 0 < held["rejected"] < 400
    assert held["completed"] + held["rejected"] == 400
    assert held["ttft_s"]["p90"] < 6.0


def test_an_idle_cluster_refuses_what_its_given_time_model_says_is_over() -> None:
    """30 prompts that take seconds each arrive a minute apart. The time model is exact, so each is refused."""
    rows = [
        b'{"timestamp": %d, "input_length": 30000, "output_length": 5, "hash_ids": [%s]}'
        % (60_000 * i, b",".join(b"%d" % (100 * i + j) for j in range(59)))
        for i in range(30)
    ]
    free = report(simulated(rows))
    held = report(simulated(rows, ttft_slo_s=0.01, admission="baseline"))
    assert (free["completed"], free["rejected"]) == (30, 0)
    assert free["ttft_s"]["mean"] > 1.0
    assert (held["completed"], held["rejected"], held["failed"]) == (0, 30, 0)


def test_short_prompts_may_be_prefilled_where_they_are_decoded() -> None:
    rows = [
        b'{"timestamp": %d, "input_length": 50, "output_length": 20, "hash_ids": [%d]}' % (1000 * i, i)
        for i in range(20)
    ]
    cluster = simulated(rows, inline_tokens=64)
    assert report(cluster)["completed"] == 20
    assert (
        sum(w.machine.counters["prompt_tokens_computed"] for n, w in cluster.workers.items() if "decode" in n)
        == 1000
    )


def test_one_token_answers_need_no_decode_node() -> None:
    row = b'{"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [1, 2]}'
    cluster = simulated([row])
    result = report(cluster)
    assert (result["completed"], result["output_tokens"]) == (1, 1)
    assert all(n["steps"] == 0 for name, n in result["nodes"].items() if "decode" in name)


def test_the_conductors_part_is_all_its_machines(lines: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Feeding the recorded events to a fresh machine gives the same commands, so nothing else took part in deciding."""
    log: list[tuple[ConductorMachine, Any, float, list[Any]]] = []
    handle = ConductorMachine.handle

    def noting(self: ConductorMachine, event: Any, now: float) -> list[Any]:
        commands = handle(self, event, now)
        log.append((self, event, now, commands))
        return commands

    monkeypatch.setattr(ConductorMachine, "handle", noting)
    cluster = simulated(lines[:150])
    monkeypatch.undo()
    fresh = ConductorMachine(cluster.conductor.config)
    its = [entry for machine, *entry in log if machine is cluster.conductor]
    assert all(fresh.handle(event, now) == commands for event, now, commands in its)
    assert fresh.placed == 150


@needs_conversation_trace
@pytest.mark.slow
def test_on_the_conversation_trace_policies_rank_as_in_the_papers() -> None:
    mean = {}
    for policy in POLICIES:
        cluster = SimulatedCluster(SimulationConfig(policy=policy), read_trace(CONVERSATION))
        cluster.run()
        cluster.check()
        result = report(cluster)
        assert result["completed"] == 12_031
        mean[policy] = result["ttft_s"]["mean"]
    assert mean["random"] > mean["load_balance"] > mean["cache_aware"] > mean["kvcache_centric"]


def test_fitted_time_models_predict_noisy_nodes_without_bias(lines: list[bytes]) -> None:
    """The first prompts teach the nodes. After them, predicted and measured times to first token agree on average."""
    cluster = SimulatedCluster(
        SimulationConfig(prefill=4, decode=4, fitted_costs=True, noise=0.1, cost="llama2-70b-8xa800"),
        list(parse_trace(lines)),
    )
    cluster.run()
    cluster.check()
    for name, worker in cluster.workers.items():
        if name.startswith("prefill"):
            true, fitted = PRESETS[cluster.config.cost], worker.machine.cost
            assert fitted != true
            assert compute_s(fitted, 0, 8000) == pytest.approx(compute_s(true, 0, 8000), rel=0.08)


def test_noise_is_its_seed(lines: list[bytes]) -> None:
    def ttft(**config: Any) -> dict[str, float]:
        result: dict[str, float] = report(simulated(lines[:100], **config))["ttft_s"]
        return result

    assert ttft(noise=0.2, seed=1) == ttft(noise=0.2, seed=1)
    assert ttft(noise=0.2, seed=1) != ttft(noise=0.2, seed=2)
    assert ttft(noise=0.2) != ttft()
