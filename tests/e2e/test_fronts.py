"""All ways in, over real services (toy engine): the same by each, and a gateway that ends in good order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.fakes.fronts import Got, HttpStream, HttpWhole, Nats, all_fronts
from tests.support.processes.cluster import Cluster, cluster

MODEL = "toy:step_ms=2"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("fronts"), model=MODEL) as running:
        yield running


CASES: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"messages": [{"role": "user", "content": "<<say:The moon 月 is out 😀>>"}], "logprobs": True}),
    ("chat", {"messages": [{"role": "user", "content": "<<say:ABCDEFGHIJKL>>"}], "stop": ["DEFGHIJ"]}),
    ("chat", {"messages": [{"role": "user", "content": "<<say:>>"}]}),
    ("completion", {"prompt": "abc " * 30, "max_tokens": 40, "seed": 5, "temperature": 0.8, "logprobs": 2}),
    ("completion", {"prompt": "abc", "max_tokens": 1, "temperature": 0}),
    ("completion", {"prompt": "abc", "max_tokens": 2, "temperature": 0}),
    ("completion", {"prompt": ["abc", "xyz"], "max_tokens": 12, "n": 2, "seed": 9}),
]


@pytest.mark.parametrize(("kind", "body"), CASES)
async def test_every_front_gives_the_same(house: Cluster, kind: str, body: dict[str, Any]) -> None:
    first: Got | None = None
    for front in all_fronts(house.url, house.nats.url):
        got = await front.ask(kind, {"model": "toy"} | body)
        assert got.error is None
        got.chunks, got.usage = [], _without_cache(got.usage)
        assert first in (None, got), type(front).__name__
        first = got
    house.wait_idle()


def _without_cache(usage: dict[str, Any] | None) -> dict[str, Any]:
    """The first to ask finds nothing in the cache, the others do."""
    assert usage is not None
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


@pytest.mark.parametrize(
    ("asked", "param", "told"),
    [
        ({"guided_choice": ["a"], "logit_bias": {"97": -100}}, "logit_bias", []),
        ({"guided_choice": ["ab"], "logit_bias": {"98": -100}}, "logit_bias", ["a"]),
        ({"guided_regex": "abc", "stop_token_ids": [98], "min_tokens": 3}, "min_tokens", ["a"]),
    ],
)
async def test_a_request_that_leaves_no_token_is_told_which_field_does(
    house: Cluster, asked: dict[str, Any], param: str, told: list[str]
) -> None:
    """Before the first token with a status, later at the end of what there is; whoever is beside it is answered."""
    beside = asyncio.create_task(HttpStream(house.url, house.nats.url).ask("completion", BESIDE))
    for front in all_fronts(house.url, house.nats.url):
        got = await front.ask("completion", {"model": "toy", "prompt": "abc", "max_tokens": 9} | asked)
        name = type(front).__name__
        assert got.error is not None, name
        assert (got.error["param"], got.error["code"]) == (param, "invalid"), name
        if not isinstance(front, Nats):  # whose errors are of the protocol, not of OpenAI's
            assert got.error["type"] == "invalid_request_error"
        assert f"token {len(told)} of the answer" in got.error["message"], name
        if isinstance(front, HttpWhole):
            assert got.status == 400
        elif isinstance(front, HttpStream):
            assert got.status == (200 if told else 400)
        assert got.texts == ([] if isinstance(front, HttpWhole) else told), name
    assert (await beside).error is None
    house.wait_idle()


BESIDE = {"model": "toy", "prompt": "beside it", "max_tokens": 300}


async def test_the_official_client(house: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        assert [m.id for m in (await client.models.list()).data] == ["toy"]
        stream = await client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": "<<say:Hello there>>"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there"
        assert chunks[-1].usage is not None
        whole = await client.completions.create(model="toy", prompt="abc", max_tokens=5, n=2, logprobs=1)
        assert [len(c.text) for c in whole.choices] == [5, 5]
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="toy", messages=[])


async def test_clients_that_leave_leave_nothing(house: Cluster) -> None:
    async def leave() -> None:
        body = {"model": "toy", "prompt": "for ever", "max_tokens": 2000, "stream": True}
        async with (
            httpx.AsyncClient(base_url=house.url, trust_env=False) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    return

    await asyncio.gather(*(leave() for _ in range(8)))
    house.wait_idle()


async def test_a_gateway_told_to_stop_ends_its_streams_first(tmp_path: Any) -> None:
    with cluster(tmp_path, model="toy:step_ms=20") as house:
        front = HttpStream(house.url, house.nats.url)
        words = "on and on, " * 15 + "to the very end"  # seconds, so that a heartbeat tells of it
        body = {"model": "toy", "messages": [{"role": "user", "content": f"<<say:{words}>>"}]}
        asked = asyncio.create_task(front.ask("chat", body))
        await asyncio.to_thread(
            house.wait_for, lambda: house.loads["gateway-0"].running == 1, 20.0, "it runs"
        )
        codes: list[int] = []
        stopping = threading.Thread(target=lambda: codes.append(house.term("gateway-0")))
        stopping.start()
        got = await asked
        await asyncio.to_thread(stopping.join)
        assert got.error is None
        assert got.texts == [words]
        assert codes == [0]
