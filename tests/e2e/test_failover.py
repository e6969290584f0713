"""Whatever is killed, a client sees a pause and then the very same text."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from tests.support.ask import Answer, body, follow
from tests.support.processes.launched import Launched, launched
from tests.support.until import until

STREAMS = 8
VICTIMS = ("decode-0", "prefill-0", "cache-0", "conductor-0", "nats")
PROMPT = "The history of the town of {name}, its river, its bridges and its people, told in the order of the years:"
NAMES = ("Arlen", "Bruma", "Castel", "Dorn", "Elmar", "Fiori", "Garda", "Holm")

REAL = pytest.param("real", marks=[pytest.mark.real, pytest.mark.slow])


@pytest.fixture(scope="module", params=["toy:step_ms=25,prefill_us=200", REAL])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    model = "smollm2-135m" if request.param == "real" else request.param
    flags = [
        "--model",
        model,
        "--prefill",
        "2",
        "--decode",
        "2",
        "--kv-memory",
        "256M",
        "--pool-memory",
        "256M",
    ]
    flags += ["--set", "conductor.inline_tokens=0"]  # every prompt goes by a prefill node
    if request.param == "real":
        flags += ["--dtype", "float32"]
    with launched(tmp_path_factory.mktemp("failover") / "run", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def new_tokens(cluster: Launched) -> int:
    toy = any(n["model"].startswith("toy") for n in cluster.status()["nodes"])
    return 120 if toy else 60


@pytest_asyncio.fixture
async def client(cluster: Launched) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url) as it:
        yield it


class Undisturbed:
    """What eight streams say when nobody is killed; asked once for each kind of request."""

    def __init__(self) -> None:
        self._known: dict[str, list[list[int]]] = {}

    async def tokens(
        self, cluster: Launched, client: httpx.AsyncClient, new_tokens: int, **options: Any
    ) -> Any:
        key = repr(sorted(options.items()))
        if key not in self._known:
            self._known[key] = await Crowd(client, new_tokens, **options).run()
            cluster.wait_idle()
            assert cluster.counters("prefill")["accepted"] > 0
        return self._known[key]


@pytest.fixture(scope="module")
def calm(cluster: Launched) -> Undisturbed:
    return Undisturbed()


class Crowd:
    """Eight streams at once, watched while they run."""

    def __init__(self, client: httpx.AsyncClient, new_tokens: int, **options: Any) -> None:
        self.client = client
        self.new_tokens = new_tokens
        self.options = options
        self.answers = [Answer() for _ in range(STREAMS)]

    async def run(
        self, then: Callable[[], Awaitable[None]] | None = None, after_tokens: int = 10
    ) -> list[list[int]]:
        """The tokens of every stream. `then` happens once every stream has `after_tokens`."""
        async with asyncio.TaskGroup() as tasks:
            for i in range(STREAMS):
                tasks.create_task(self._one(i))
            if then is not None:
                await until(lambda: min(len(a.token_ids) for a in self.answers) >= after_tokens, 300)
                await then()
                assert any(a.finish_reason is None for a in self.answers), "too late: all streams had ended"
        for answer in self.answers:
            assert answer.finish_reason == "length"
            assert len(answer.token_ids) == answer.completion_tokens == self.new_tokens
        return [a.token_ids for a in self.answers]

    async def _one(self, i: int) -> None:
        prompt = PROMPT.format(name=NAMES[i])
        await follow(self.client, body(prompt, self.new_tokens, **self.options), self.answers[i])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", VICTIMS)
async def test_kill_dash_nine_under_eight_streams_changes_no_text(
    cluster: Launched, client: httpx.AsyncClient, calm: Undisturbed, new_tokens: int, victim: str
) -> None:
    undisturbed = await calm.tokens(cluster, client, new_tokens)
    killed: list[int] = []

    async def kill() -> None:
        killed.append(cluster.signal(victim, signal.SIGKILL))

    assert await Crowd(client, new_tokens).run(kill) == undisturbed
    assert killed
    _restarted(cluster, victim, killed[0])


@pytest.mark.timeout(600)
async def test_kill_dash_nine_of_a_prefill_node_while_it_prefills(
    cluster: Launched, client: httpx.AsyncClient, calm: Undisturbed, new_tokens: int
) -> None:
    undisturbed = await calm.tokens(cluster, client, new_tokens)
    crowd = Crowd(client, new_tokens)
    pid = cluster.pid("prefill-1")
    os.kill(pid, signal.SIGSTOP)  # whatever it is given from now on stays unanswered

    async def kill() -> None:
        os.kill(pid, signal.SIGKILL)

    assert await crowd.run(kill, after_tokens=0) == undisturbed
    _restarted(cluster, "prefill-1", pid)


@pytest.mark.timeout(600)
async def test_a_seeded_sample_is_the_same_across_a_failover(
    cluster: Launched, client: httpx.AsyncClient, calm: Undisturbed, new_tokens: int
) -> None:
    undisturbed = await calm.tokens(cluster, client, new_tokens, temperature=0.8, seed=42)
    killed: list[int] = []

    async def kill() -> None:
        killed.append(cluster.signal("decode-1", signal.SIGKILL))

    assert await Crowd(client, new_tokens, temperature=0.8, seed=42).run(kill) == undisturbed
    _restarted(cluster, "decode-1", killed[0])


@pytest.mark.timeout(600)
async def test_sigterm_of_a_decode_node_drains_without_an_error(
    cluster: Launched, client: httpx.AsyncClient, calm: Undisturbed, new_tokens: int
) -> None:
    undisturbed = await calm.tokens(cluster, client, new_tokens)
    told: list[int] = []

    async def term() -> None:
        told.append(cluster.signal("decode-0", signal.SIGTERM))

    assert await Crowd(client, new_tokens).run(term) == undisturbed
    _restarted(cluster, "decode-0", told[0])


def _restarted(cluster: Launched, name: str, old_pid: int) -> None:
    """The launcher started it again, and the whole cluster is ready and holds nothing."""
    cluster.wait_for(
        lambda: cluster.pid(name) != old_pid and not psutil.pid_exists(old_pid), 30, f"a new {name}"
    )
    cluster.wait_for(lambda: all(n["stage"] == "ready" for n in cluster.status()["nodes"]), 60, "all ready")
    cluster.wait_for(lambda: len(cluster.status()["nodes"]) == 7, 30, "all seven nodes")
    cluster.wait_ready()
    cluster.wait_idle()
