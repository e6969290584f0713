"""`tsukimi up --prefill-stages 2`: a prefill node is a group of processes, and nobody outside can tell."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.ask import Answer, body, follow, stream
from tests.support.launched import Launched, launched
from tests.support.prompts import english_ids
from tests.support.until import until

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

NEW_TOKENS = 24
PROMPTS = [english_ids(tokens, skip=300 * i) for i, tokens in enumerate((900, 1300, 40))]
FLAGS = ("--model", "smollm2-135m", "--dtype", "float32", "--kv-memory", "256M", "--pool-memory", "256M")
FLAGS += ("--threads", "1", "--set", "conductor.inline_tokens=0")  # every prompt goes by a prefill node


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What a cluster without stages says."""
    with launched(tmp_path_factory.mktemp("plain") / "run", *FLAGS) as cluster:
        return asyncio.run(answers(cluster))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Launched]:
    with launched(tmp_path / "run", *FLAGS, "--prefill-stages", "2") as running:
        yield running


async def answers(cluster: Launched) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=cluster.url) as client:
        return [(await stream(client, prompt, NEW_TOKENS)).token_ids for prompt in PROMPTS]


def stages(cluster: Launched) -> list[psutil.Process]:
    """The children of the prefill node."""
    node = psutil.Process(cluster.pid("prefill-0"))
    return [p for p in node.children(recursive=True) if "shared.engine.pipeline.stage" in p.cmdline()]


def test_answers_are_the_same_and_no_process_is_left(expected: list[list[int]], tmp_path: Path) -> None:
    with launched(tmp_path / "run", *FLAGS, "--prefill-stages", "2") as cluster:
        (stage,) = stages(cluster)
        assert asyncio.run(answers(cluster)) == expected
        cluster.wait_idle()
        counters = cluster.counters("prefill")
        assert counters["prompt_tokens_computed"] >= sum(map(len, PROMPTS))
        assert counters["layer_slices_sent_before_last_layer"] > 0
        assert cluster.counters("decode")["prompt_tokens_computed"] == 0
        assert stages(cluster) == [stage]
    assert not stage.is_running()


async def test_kill_dash_nine_of_a_stage_under_load_changes_no_text(
    expected: list[list[int]], cluster: Launched
) -> None:
    """While some prompts are computed. The launcher starts the group anew."""
    (stage,) = stages(cluster)
    node = psutil.Process(cluster.pid("prefill-0"))
    told = [Answer() for _ in PROMPTS]
    async with httpx.AsyncClient(base_url=cluster.url) as client, asyncio.TaskGroup() as tasks:
        for answer, prompt in zip(told, PROMPTS, strict=True):
            tasks.create_task(follow(client, body(prompt, NEW_TOKENS), answer))
        before = stage.cpu_times().user
        await until(lambda: stage.cpu_times().user > before + 0.2, 60)  # it computes
        stage.kill()
        assert not all(answer.token_ids for answer in told), "too late: nothing was left to prefill"
    assert [answer.token_ids for answer in told] == expected
    assert all(answer.finish_reason == "length" for answer in told)
    await until(lambda: not stage.is_running() and not node.is_running(), 20)
    cluster.wait_for(lambda: len(stages(cluster)) == 1, 60, "a new stage")
    cluster.wait_for(lambda: all(n["stage"] == "ready" for n in cluster.status()["nodes"]), 90, "all ready")
    cluster.wait_idle()


def test_a_model_without_layers_is_refused_with_the_reason(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="the toy engine has no layers"),
        launched(tmp_path / "run", "--model", "toy", "--prefill-stages", "2"),
    ):
        pass
