"""The launcher with the real services and the toy engine: starting, stopping and dying under load."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.launcher_process import LauncherProcess, nothing_left
from tests.support.ask import Answer, body, follow
from tests.support.processes.launched import Launched, launched
from tests.support.processes.spawn import wait_until
from tests.support.until import until

TOY = ["--model", "toy:step_ms=5", "--kv-memory", "16M", "--pool-memory", "16M"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    with launched(
        tmp_path_factory.mktemp("services") / "run", *TOY, "--prefill", "2", "--decode", "2"
    ) as running:
        yield running


def test_ready_means_that_the_model_answers(tmp_path: Path) -> None:
    """Polled from the first moment on: no 200 of /ready before a completion works, no model before there is one."""
    launcher = LauncherProcess(tmp_path / "run", *TOY)
    url = f"http://127.0.0.1:{launcher.port}"
    seen: set[tuple[int, int]] = set()

    def ready() -> bool:
        try:
            live, status = (httpx.get(f"{url}/{path}").status_code for path in ("live", "ready"))
        except httpx.HTTPError:
            return False
        seen.add((live, status))
        return status == 200

    try:
        launcher.start()
        wait_until(ready, 60, "/ready is 200")
        answer = httpx.post(f"{url}/v1/completions", json=body("Hello", 3, model="toy"), timeout=30)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert seen <= {(200, 503), (200, 200)}, "/live is about the process, /ready about the service"
    finally:
        launcher.end()


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0", "cache-0", "conductor-0"])
async def test_sigterm_under_load_fails_no_request(cluster: Launched, victim: str) -> None:
    """20 requests a second; the node drains, ends with 0, comes back; every answer is whole."""
    answers: list[Answer] = []
    old = cluster.pid(victim)
    async with httpx.AsyncClient(base_url=cluster.url) as client, asyncio.TaskGroup() as tasks:
        for i in range(80):
            answers.append(Answer())
            tasks.create_task(follow(client, body(f"Request {i} for {victim}", 24, model="toy"), answers[-1]))
            if i == 20:
                cluster.signal(victim, signal.SIGTERM)
            await asyncio.sleep(0.05)
    assert {(a.finish_reason, a.completion_tokens) for a in answers} == {("length", 24)}
    cluster.wait_for(lambda: cluster.pid(victim) != old, 30, f"a new {victim}")
    cluster.wait_for(lambda: all(n["stage"] == "ready" for n in cluster.status()["nodes"]), 30, "all ready")
    said = (cluster.run_dir / "launcher.log").read_text()
    assert f"{victim:<12} exited with code 0; restarting" in said
    cluster.wait_idle()


def test_a_gateway_told_to_stop_finishes_its_streams(tmp_path: Path) -> None:
    """`tsukimi down` in the middle of eight answers: they end whole, then everything is gone."""
    with launched(tmp_path / "run", *TOY) as cluster:
        answers = [Answer() for _ in range(8)]
        launcher = LauncherProcess(cluster.run_dir)
        processes = launcher.processes()

        async def ask() -> None:
            async with httpx.AsyncClient(base_url=cluster.url) as client, asyncio.TaskGroup() as tasks:
                for i, answer in enumerate(answers):
                    tasks.create_task(follow(client, body(f"Before the end {i}", 200, model="toy"), answer))
                await until(lambda: all(a.token_ids for a in answers))
                await asyncio.to_thread(cluster.tsukimi, "down")

        asyncio.run(ask())
        assert {(a.finish_reason, a.completion_tokens) for a in answers} == {("length", 200)}
        assert nothing_left(processes, cluster.port)


@pytest.mark.slow
def test_twenty_killed_lives_leave_nothing_in_shared_memory(cluster: Launched) -> None:
    before = set(os.listdir("/dev/shm"))
    for i in range(20):
        victim = ("cache-0", "prefill-0", "decode-0", "decode-1")[i % 4]
        old = cluster.signal(victim, signal.SIGKILL)
        cluster.wait_for(lambda victim=victim, old=old: cluster.pid(victim) != old, 30, f"a new {victim}")
    cluster.wait_for(lambda: all(n["stage"] == "ready" for n in cluster.status()["nodes"]), 60, "all ready")
    assert set(os.listdir("/dev/shm")) <= before


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with launched(tmp_path / "run", *TOY) as cluster:
        launcher = LauncherProcess(cluster.run_dir)
        processes = launcher.processes()
        assert len(processes) == 6
        os.kill(launcher.state().launcher.pid, signal.SIGKILL)
        wait_until(lambda: nothing_left(processes, cluster.port), 10, "everything is gone")
