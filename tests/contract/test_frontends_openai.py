"""The official client, unmodified, against the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from tests.support.fakes.fake_cluster import FakeCluster, memory_cluster
from tests.support.fakes.fake_nodes import BUSY


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with memory_cluster() as cluster:
        yield cluster
        await cluster.idle()


@pytest.fixture
async def client(cluster: FakeCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_models(client: openai.AsyncOpenAI) -> None:
    models = await client.models.list()
    assert [m.id for m in models.data] == ["toy"]
    assert (await client.models.retrieve("toy")).owned_by == "tsukimi"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nope")


async def test_a_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "<<say:Hello there>>"}],
        temperature=0,
        max_tokens=50,
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == "Hello there"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.system_fingerprint
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_streamed_chat(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="toy",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": "<<say:Hello 😀>>"},
        ],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=1,
        n=2,
    )
    texts = {0: "", 1: ""}
    finishes = {}
    entries = 0
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            entries += len(choice.logprobs.content or []) if choice.logprobs else 0
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    assert texts == {0: "Hello 😀", 1: "Hello 😀"}
    assert finishes == {0: "stop", 1: "stop"}
    assert usage is not None
    assert usage.completion_tokens == entries == 2 * 11


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="toy",
        prompt=["abc", "xyz"],
        max_tokens=6,
        seed=7,
        logprobs=2,
        top_p=0.9,
        extra_body={"top_k": 10},
    )
    assert [len(c.text) for c in answer.choices] == [6, 6]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    again = await client.completions.create(
        model="toy", prompt="abc", max_tokens=6, seed=7, top_p=0.9, extra_body={"top_k": 10}, stream=True
    )
    assert "".join([c.choices[0].text async for c in again]) == answer.choices[0].text


async def test_stop_strings(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "<<say:one two three>>"}], stop=[" two", "x"]
    )
    assert answer.choices[0].message.content == "one"
    assert answer.choices[0].finish_reason == "stop"


async def test_errors_are_the_clients_own_exceptions(
    client: openai.AsyncOpenAI, cluster: FakeCluster
) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="toy", messages=[])
    assert bad.value.param == "messages"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="gpt-5", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model="toy", prompt="x", max_tokens=1 << 21)
    assert long.value.code == "context_length_exceeded"
    cluster.conductor.refuse = BUSY
    with pytest.raises(openai.RateLimitError) as busy:
        await client.completions.create(model="toy", prompt="x")
    assert busy.value.response.headers["retry-after"] == "3"


async def test_an_error_in_a_stream_raises(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "<<fail:3>>"}], stream=True
    )
    got: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            got.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError, match="internal error"):
        await read()
    assert len("".join(got)) == 3


async def test_leaving_a_stream_frees_the_nodes(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    cluster.slow_down(0.01)
    stream = await client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "for ever"}], stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    await cluster.idle()
    assert cluster.sample("tsukimi_requests_ended_total", outcome="aborted") == 1
