"""`tsukimi up --prefill-stages 2`: a prefill node is a group of processes, and nobody outside can tell."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.ask import Answer, body, follow, stream
from tests.support.engine.prompts import english_ids
from tests.support.engine.reference import greedy
from tests.support.processes.launched import Launched, launched
from tests.support.processes.spawn import ended
from tests.support.processes.stages import is_stage
from tests.support.until import until

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

NEW_TOKENS = 24
FLAGS = ("--model", "smollm2-135m", "--dtype", "float32", "--kv-memory", "256M", "--pool-memory", "256M")
FLAGS += ("--threads", "1", "--set", "conductor.inline_tokens=0")  # every prompt goes by a prefill node


def prompts(skip: int) -> list[list[int]]:
    return [english_ids(tokens, skip=skip + 300 * i) for i, tokens in enumerate((900, 1300, 40))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """In the end no process of it is left, the stages included."""
    with launched(tmp_path_factory.mktemp("staged") / "run", *FLAGS, "--prefill-stages", "2") as running:
        yield running
        last = stages(running)
        assert last
    assert all(ended(stage) for stage in last)


def stages(cluster: Launched) -> list[psutil.Process]:
    """The children of the prefill node."""
    node = psutil.Process(cluster.pid("prefill-0"))
    return [p for p in node.children(recursive=True) if is_stage(p)]


async def test_answers_are_the_same(cluster: Launched) -> None:
    (stage,) = stages(cluster)
    async with httpx.AsyncClient(base_url=cluster.url) as client:
        for prompt in prompts(0):
            assert (await stream(client, prompt, NEW_TOKENS)).token_ids == greedy(prompt, NEW_TOKENS)
    cluster.wait_idle()
    counters = cluster.counters("prefill")
    assert counters["prompt_tokens_computed"] >= sum(map(len, prompts(0)))
    assert counters["layer_slices_sent_before_last_layer"] > 0
    assert cluster.counters("decode")["prompt_tokens_computed"] == 0
    assert stages(cluster) == [stage]


async def test_kill_dash_nine_of_a_stage_under_load_changes_no_text(cluster: Launched) -> None:
    """While some prompts are computed. The launcher starts the group anew."""
    (stage,) = stages(cluster)
    node = psutil.Process(cluster.pid("prefill-0"))
    told = [Answer() for _ in prompts(1000)]
    async with httpx.AsyncClient(base_url=cluster.url) as client, asyncio.TaskGroup() as tasks:
        for answer, prompt in zip(told, prompts(1000), strict=True):
            tasks.create_task(follow(client, body(prompt, NEW_TOKENS), answer))
        before = stage.cpu_times().user
        await until(lambda: stage.cpu_times().user > before + 0.2, 60)  # it computes
        stage.kill()
        assert not all(answer.token_ids for answer in told), "too late: nothing was left to prefill"
    assert [answer.token_ids for answer in told] == [greedy(p, NEW_TOKENS) for p in prompts(1000)]
    assert all(answer.finish_reason == "length" for answer in told)
    await until(lambda: ended(stage) and ended(node), 20)
    cluster.wait_for(lambda: len(stages(cluster)) == 1, 60, "a new stage")
    cluster.wait_for(lambda: all(n["stage"] == "ready" for n in cluster.status()["nodes"]), 90, "all ready")
    cluster.wait_idle()


def test_a_model_without_layers_is_refused_with_the_reason(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="the toy engine cannot be divided into stages"),
        launched(tmp_path / "run", "--model", "toy", "--prefill-stages", "2"),
    ):
        pass
