"""The compose file, built and run: two prefill and two decode containers."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.compose.stack import MODEL, Stack, docker, stack, why_no_engine
from tests.support.ask import Answer, body, follow
from tests.support.readme import curl_line
from tests.support.until import until

pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_no_engine()), reason=why_no_engine() or "an engine is here"),
]

STREAMS, NEW_TOKENS = 8, 64
TORCH_FREE = ("tsukimi-gateway", "tsukimi-conductor", "tsukimi-cache-node")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Stack]:
    with stack("--scale", "prefill=2", "--scale", "decode=2") as running:
        yield running


@pytest.mark.parametrize("image", TORCH_FREE)
def test_images_of_the_control_side_have_no_torch(cluster: Stack, image: str) -> None:
    code = "import importlib.util as u; print([m for m in ('torch', 'triton', 'nvidia') if u.find_spec(m)])"
    assert docker("run", "--rm", "--entrypoint", "python", image, "-c", code).strip() == "[]"


@pytest.mark.parametrize("image", [*TORCH_FREE, "tsukimi-prefill", "tsukimi-decode"])
def test_nothing_runs_as_root(cluster: Stack, image: str) -> None:
    assert docker("run", "--rm", "--entrypoint", "id", image, "-u").strip() == "10001"


def test_scaled_services_are_nodes_of_their_own(cluster: Stack) -> None:
    nodes = cluster.status()["nodes"]
    assert sorted(n["role"] for n in nodes) == sorted(
        ["gateway", "conductor", "cache", *2 * ["prefill", "decode"]]
    )
    assert len({n["node"] for n in nodes}) == len({n["host"] for n in nodes}) == 7
    cluster.wait_healthy()


def test_the_readmes_curl_line_works(cluster: Stack) -> None:
    answer = subprocess.run(
        ["bash", "-c", curl_line(cluster.url)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in answer.stdout
    assert answer.stdout.rstrip().endswith("data: [DONE]")


class Crowd:
    """Long greedy answers at once."""

    def __init__(self, cluster: Stack, streams: int = STREAMS, new_tokens: int = NEW_TOKENS) -> None:
        self._cluster = cluster
        self._new_tokens = new_tokens
        self.answers = [Answer() for _ in range(streams)]

    async def run(self, then: Callable[[], object] | None = None) -> list[list[int]]:
        """Their tokens. `then` is done once every answer has begun and before any has ended."""
        async with httpx.AsyncClient(base_url=self._cluster.url) as client, asyncio.TaskGroup() as tasks:
            for i, answer in enumerate(self.answers):
                prompt = f"The story of the old bridge number {i}, told from its beginning to its end:"
                tasks.create_task(follow(client, body(prompt, self._new_tokens, model=MODEL), answer))
            if then is not None:
                await until(lambda: all(a.token_ids for a in self.answers), 120)
                assert any(a.finish_reason is None for a in self.answers), "too late: all had ended"
                await asyncio.to_thread(then)
        assert {(a.finish_reason, a.completion_tokens) for a in self.answers} == {
            ("length", self._new_tokens)
        }
        return [a.token_ids for a in self.answers]


@pytest.mark.parametrize("service", ["decode", "prefill"])
async def test_a_killed_container_loses_no_stream(cluster: Stack, service: str) -> None:
    undisturbed = await Crowd(cluster).run()
    victim = cluster.containers(service)[0]

    def kill() -> None:
        docker("kill", victim)

    try:
        assert await Crowd(cluster).run(kill) == undisturbed
    finally:
        docker("start", victim)
    await until(
        lambda: len(cluster.nodes(service)) == 2 and all(_ready(n) for n in cluster.nodes(service)), 120
    )


def _ready(node: dict[str, object]) -> bool:
    return node["stage"] == "ready"


def test_a_configuration_error_has_its_own_exit_code(cluster: Stack) -> None:
    done = subprocess.run(
        ["docker", "run", "--rm", "--env", "TSUKIMI_DECODE_KV_BYTES=much", "tsukimi-decode"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 78
    assert "TSUKIMI_DECODE_KV_BYTES" in done.stderr


async def test_compose_stop_ends_every_service_in_good_order(cluster: Stack) -> None:
    """Answers that are under way end within the grace, then every process exits with 0. The last test: all is stopped."""

    def stop() -> None:
        cluster.compose("stop", "gateway")

    await Crowd(cluster, streams=3, new_tokens=8).run(stop)  # well within the grace, also on a busy machine
    cluster.compose("stop")
    codes = {c["Name"]: c["ExitCode"] for c in cluster.states() if c["Service"] != "nats"}
    assert set(codes.values()) == {0}, codes
