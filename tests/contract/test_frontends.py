"""All ways to request a generation give the same text, logprobs, finish reasons and usage: one suite for all."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.protocol.errors import Invalid
from tests.support.fakes.fake_cluster import FakeCluster, nats_cluster
from tests.support.fakes.fake_nodes import BUSY
from tests.support.fakes.fronts import Front, Got, HttpWhole, Nats, Socket, all_fronts
from tests.support.processes.nats import nats_server


class House:
    def __init__(self, cluster: FakeCluster, fronts: list[Front]) -> None:
        self.cluster, self.fronts = cluster, fronts

    async def ask_all(self, kind: str, body: dict[str, Any]) -> Got:
        """Ask through every front, assert that all got the same, and return it."""
        answers = [await front.ask(kind, {"model": "toy"} | body) for front in self.fronts]
        first = answers[0]
        for got, front in zip(answers, self.fronts, strict=True):
            name = type(front).__name__
            assert got.error is None, name
            assert (got.texts, got.finishes, got.usage) == (first.texts, first.finishes, first.usage), name
            assert got.logprobs == first.logprobs, name
        await self.cluster.idle()
        return first


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with nats_server() as server, nats_cluster(server) as cluster:
        yield House(cluster, all_fronts(cluster.url, server.url))


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def test_chats_are_the_same_by_every_route(house: House) -> None:
    got = await house.ask_all("chat", user("<<say:The moon 月 is out 😀>>"))
    assert got.texts == ["The moon 月 is out 😀"]
    assert got.finishes == ["stop"]
    assert got.usage is not None
    assert got.usage["completion_tokens"] == len("The moon 月 is out 😀".encode()) + 1
    assert got.usage["total_tokens"] == got.usage["prompt_tokens"] + got.usage["completion_tokens"]


async def test_completions_are_the_same_by_every_route(house: House) -> None:
    got = await house.ask_all("completion", {"prompt": "abc", "max_tokens": 20, "seed": 5})
    assert got.finishes == ["length"]
    assert got.usage is not None
    assert got.usage["completion_tokens"] == 20


async def test_stop_strings_are_the_same_by_every_route(house: House) -> None:
    body = user("<<say:ABCDEFGHIJKLMNOP>>") | {"stop": ["DEFGHIJ", "zz"], "logprobs": True}
    got = await house.ask_all("chat", body)
    assert got.texts == ["ABC"]
    assert got.finishes == ["stop"]
    assert [token for token, _ in got.logprobs[0]] == ["A", "B", "C"]
    assert got.usage is not None
    assert got.usage["completion_tokens"] == len("ABCDEFGHIJ")


async def test_a_stop_string_met_by_the_first_token(house: House) -> None:
    got = await house.ask_all("chat", user("<<say:ABC>>") | {"stop": "A"})
    assert got.texts == [""]
    assert got.usage is not None
    assert got.usage["completion_tokens"] == 1


SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
    ({"guided_regex": r"\d{3}-\d{4}"}, r"\d{3}-\d{4}"),
    ({"structured_outputs": {"choice": ["maybe", "never"]}}, "maybe|never"),
]


@pytest.mark.parametrize(("shape", "looks"), SHAPES)
async def test_structured_output_is_the_same_by_every_route(
    house: House, shape: dict[str, Any], looks: str
) -> None:
    got = await house.ask_all("chat", user("any") | {"seed": 3, "max_tokens": 300} | shape)
    assert re.fullmatch(looks, got.texts[0])
    assert got.finishes == ["stop"]


async def test_penalties_and_bans_are_the_same_by_every_route(house: House) -> None:
    body = {"prompt": "abc", "max_tokens": 20, "temperature": 0}
    plain = await house.ask_all("completion", body)
    assert (await house.ask_all("completion", body | {"frequency_penalty": 2.0})).texts != plain.texts
    banned = {str(ord(c)): -100 for c in set(plain.texts[0])}
    without = await house.ask_all("completion", body | {"logit_bias": banned})
    assert not set(without.texts[0]) & set(plain.texts[0])
    ended = await house.ask_all(
        "completion", body | {"stop_token_ids": [ord(plain.texts[0][5])], "min_tokens": 6}
    )
    assert ended.finishes == ["stop"] or ended.usage["completion_tokens"] == 20  # type: ignore[index]
    assert plain.texts[0][5] not in ended.texts[0][6:]


async def test_several_choices_are_the_same_by_every_route(house: House) -> None:
    body = {"prompt": ["abc", "xyz"], "n": 3, "max_tokens": 12, "seed": 9, "temperature": 1.0}
    got = await house.ask_all("completion", body)
    assert len(got.texts) == 6
    assert len(set(got.texts[:3])) > 1
    attempts = [ask.attempt for ask in house.cluster.prefills[0].asked]
    assert len(attempts) == len(set(attempts)) == 6 * len(house.fronts)
    # The first choice of each prompt is what it would be alone.
    alone = await house.ask_all("completion", body | {"prompt": "abc", "n": 1})
    assert alone.texts == got.texts[:1]


async def test_every_token_has_its_logprob(house: House) -> None:
    got = await house.ask_all(
        "chat", user("words") | {"max_tokens": 9, "logprobs": True, "top_logprobs": 3, "seed": 1}
    )
    assert len(got.logprobs[0]) == 9
    got = await house.ask_all("chat", user("<<say:é😀>>") | {"logprobs": True})
    assert len(got.logprobs[0]) == 7  # six bytes and the EOS
    got = await house.ask_all("completion", {"prompt": "words", "max_tokens": 9, "logprobs": 2, "seed": 1})
    assert [offset for _, _, offset in got.logprobs[0]] == list(range(9))


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_counts_are_exact(house: House, most: int) -> None:
    got = await house.ask_all("completion", {"prompt": "abc", "max_tokens": most, "temperature": 0})
    assert got.usage is not None
    assert got.usage["completion_tokens"] == most
    assert len(got.texts[0]) == most
    if most == 1:
        assert not house.cluster.decodes[0].asked
    house.cluster.conductor.local = True  # the same must hold if the decode node prefills
    local = await house.ask_all("completion", {"prompt": "abc", "max_tokens": most, "temperature": 0})
    assert (local.texts, local.finishes, local.usage) == (got.texts, got.finishes, got.usage)


async def test_eos_as_the_first_token(house: House) -> None:
    got = await house.ask_all("chat", user("<<say:>>"))
    assert got.texts == [""]
    assert got.finishes == ["stop"]
    assert got.usage is not None
    assert got.usage["completion_tokens"] == 1
    assert len(house.cluster.decodes[0].cancelled) == len(house.fronts)


async def test_ignore_eos_goes_on_to_the_end(house: House) -> None:
    got = await house.ask_all(
        "chat", user("<<say:ab>>") | {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
    )
    assert got.usage is not None
    assert got.usage["completion_tokens"] == 8
    assert got.texts[0].startswith("ab")


async def test_cached_tokens_are_what_prefill_reused(house: House) -> None:
    house.cluster.prefills[0].warm_tokens = 1 << 20
    got = await house.ask_all("completion", {"prompt": "abcdef", "max_tokens": 2, "temperature": 0})
    assert got.usage is not None
    assert got.usage["prompt_tokens_details"]["cached_tokens"] == 5


async def test_refusals_name_the_field_by_every_route(house: House) -> None:
    for front in house.fronts:
        got = await front.ask("chat", {"model": "toy", "messages": []})
        assert got.error is not None
        assert got.error["param"] == "messages"
        assert got.status in (200, 400)  # NATS has no status
        got = await front.ask("chat", user("hi") | {"model": "nope"})
        assert got.error is not None
        assert got.error["param"] == "model"
        assert (await front.ask("chat", user("<<say:ok>>") | {"model": "toy"})).texts == ["ok"]


async def test_overload_and_failure_are_told_by_every_route(house: House) -> None:
    house.cluster.conductor.refuse = BUSY
    for front in house.fronts:
        got = await front.ask("chat", user("hi") | {"model": "toy"})
        assert got.error is not None
        assert got.error["code"] == "overloaded"
    house.cluster.conductor.refuse = Invalid("no such thing", param="prompt")
    for front in house.fronts:
        got = await front.ask("chat", user("hi") | {"model": "toy"})
        assert got.error is not None
        assert got.error["param"] == "prompt"
    house.cluster.conductor.refuse = None
    for front in house.fronts:
        got = await front.ask("chat", user("<<fail:2>>") | {"model": "toy"})
        assert got.error is not None
        assert got.error["code"] == "internal"
        assert "toy" not in got.error["message"]
        assert not any(got.finishes)
    await house.cluster.idle()


async def test_chunks_are_the_same_on_streams(house: House) -> None:
    """SSE, WebSocket and NATS carry identical objects."""

    def shape(got: Got) -> list[Any]:
        return [json.loads(json.dumps(c | {"id": "", "created": 0})) for c in got.chunks]

    body = user("<<say:hi there>>") | {"model": "toy", "seed": 3}
    streams = [f for f in house.fronts if not isinstance(f, HttpWhole)]
    got = [await front.ask("chat", body) for front in streams]
    joined = [
        ("".join(c["choices"][0]["delta"].get("content", "") for c in shape(g) if c["choices"])) for g in got
    ]
    assert joined == ["hi there"] * len(streams)
    keys = [{tuple(sorted(c)) for c in shape(g)} for g in got]
    assert all(k == keys[0] for k in keys)


async def test_several_requests_and_a_cancel_on_one_socket(house: House) -> None:
    from websockets.asyncio.client import connect

    house.cluster.slow_down(0.02)
    async with connect(house.cluster.url.replace("http", "ws") + "/v1/stream") as socket:
        for text in ("one", "two"):
            await socket.send(json.dumps({"kind": "chat", "model": "toy"} | user(f"<<say:{text}>>")))
        await socket.send(json.dumps({"kind": "chat", "model": "toy"} | user("for ever")))
        texts: list[str] = [""]
        while True:
            message = json.loads(await socket.recv())
            if message.get("done"):
                texts.append("")
                if message.get("cancelled"):
                    break
                continue
            for choice in message["choices"]:
                texts[-1] += choice["delta"].get("content", "")
            if len(texts) == 3 and len(texts[2]) == 5:
                await socket.send('{"cancel": true}')
        assert texts[:2] == ["one", "two"]
        await socket.send(json.dumps({"kind": "chat", "model": "toy"} | user("<<say:after>>")))
        assert json.loads(await socket.recv())["choices"]
    await house.cluster.idle()


async def test_a_socket_that_closes_frees_the_nodes(house: House) -> None:
    from websockets.asyncio.client import connect

    house.cluster.slow_down(0.02)
    async with connect(house.cluster.url.replace("http", "ws") + "/v1/stream") as socket:
        await socket.send(json.dumps({"kind": "chat", "model": "toy"} | user("for ever")))
        await socket.recv()
    await house.cluster.idle()
    assert house.cluster.sample("tsukimi_requests_ended_total", outcome="aborted") == 1


@pytest.mark.parametrize(
    ("sent", "param"),
    [("{", None), ("[]", None), ('{"model":"toy"}', "kind"), ('{"kind":"poem"}', "kind"), ("\udcff", None)],
)
async def test_nonsense_on_a_socket_is_refused_and_the_socket_lives(
    house: House, sent: str, param: str | None
) -> None:
    from websockets.asyncio.client import connect

    async with connect(house.cluster.url.replace("http", "ws") + "/v1/stream") as socket:
        await socket.send(sent.encode("utf-8", "surrogateescape"))
        answer = json.loads(await socket.recv())
        assert answer["status"] == 400
        assert answer["error"]["param"] == param
        await socket.send(json.dumps({"kind": "chat", "model": "toy"} | user("<<say:ok>>")))
        assert json.loads(await socket.recv())["choices"]


def test_the_suite_knows_every_front() -> None:
    names = {type(front) for front in all_fronts("http://x", "nats://x")}
    assert {HttpWhole, Socket, Nats} <= names
