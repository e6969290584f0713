"""What goes over HTTP: stream shapes, errors before and after the headers, bodies, readiness."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from shared.protocol.errors import Unavailable
from tests.support.fakes.fake_cluster import FakeCluster, memory_cluster
from tests.support.fakes.fake_nodes import BUSY
from tests.support.until import until

CHAT = "/v1/chat/completions"


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with memory_cluster(keep_alive_s=0.1, max_running=4, budget_s=30.0) as cluster:
        yield cluster
        await cluster.idle()


def chat(text: str = "<<say:ok>>", **more: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "user", "content": text}]} | more


async def lines(cluster: FakeCluster, body: dict[str, Any], path: str = CHAT) -> list[str]:
    async with cluster.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [line async for line in response.aiter_lines() if line]


def events(said: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in said if line.startswith("data: {")]


# -- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_no_usage_unless_it_is_asked_for(cluster: FakeCluster, options: dict[str, Any] | None) -> None:
    said = await lines(cluster, chat(stream=True, stream_options=options))
    assert said[-1] == "data: [DONE]"
    assert not any("usage" in event for event in events(said))


async def test_usage_comes_once_and_last(cluster: FakeCluster) -> None:
    said = events(await lines(cluster, chat(stream=True, stream_options={"include_usage": True})))
    assert [e["usage"] for e in said[:-1]] == [None] * (len(said) - 1)
    assert said[-1]["choices"] == []
    assert said[-1]["usage"]["completion_tokens"] == 3


async def test_stream_options_without_a_stream_are_refused(cluster: FakeCluster) -> None:
    for stream in (False, None):
        response = await cluster.http.post(
            CHAT, json=chat(stream=stream, stream_options={"include_usage": True})
        )
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "stream_options"


async def test_a_chat_stream_greets_first_and_finishes_once(cluster: FakeCluster) -> None:
    choices = [e["choices"][0] for e in events(await lines(cluster, chat("<<say:ab>>", stream=True)))]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]


async def test_characters_come_whole(cluster: FakeCluster) -> None:
    said = events(await lines(cluster, chat("<<say:a漢😀b>>", stream=True)))
    pieces = [e["choices"][0]["delta"].get("content") for e in said]
    assert "".join(p for p in pieces if p) == "a漢😀b"
    assert not any("\ufffd" in p for p in pieces if p)


async def test_a_failure_before_the_first_token_is_a_true_error(cluster: FakeCluster) -> None:
    response = await cluster.http.post(CHAT, json=chat("<<fail>>", stream=True))
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "internal error", "type": "server_error", "param": None, "code": "internal"
    }  # fmt: skip


async def test_a_failure_in_the_stream_ends_it_with_an_error(cluster: FakeCluster) -> None:
    said = await lines(cluster, chat("<<fail:3>>", stream=True))
    assert "error" in events(said)[-1]
    assert "data: [DONE]" not in said
    assert not any(c["finish_reason"] for e in events(said)[:-1] for c in e["choices"])


async def test_an_error_after_a_sign_of_life_is_an_error_event(cluster: FakeCluster) -> None:
    cluster.slow_down(0.3)
    said = await lines(cluster, chat("<<fail>>", stream=True))
    assert said[0].startswith(":")
    assert set(events(said)[0]) == {"error"}


async def test_signs_of_life_while_prefill_works(cluster: FakeCluster) -> None:
    cluster.slow_down(0.35)
    said = await lines(cluster, chat("<<say:>>", stream=True))
    assert said.count(": keep-alive") >= 2
    assert said[-1] == "data: [DONE]"


async def test_ttft_is_the_first_text(cluster: FakeCluster) -> None:
    cluster.prefills[0].token_s = 0.3
    began = asyncio.get_running_loop().time()
    async with cluster.http.stream("POST", CHAT, json=chat("<<say:ab>>", stream=True)) as response:
        async for line in response.aiter_lines():
            if '"content":"a"' in line:
                seen_s = asyncio.get_running_loop().time() - began
    await cluster.idle()
    ttft_s = cluster.sample("tsukimi_ttft_seconds_sum")
    assert 0.3 <= ttft_s <= seen_s


async def test_an_answer_without_text_has_no_ttft(cluster: FakeCluster) -> None:
    await lines(cluster, chat("<<say:>>", stream=True))
    await cluster.idle()
    assert cluster.sample("tsukimi_ttft_seconds_count") == 0


# -- errors ----------------------------------------------------------------------------------------------------------

BAD_FIELDS: list[tuple[str, Any]] = [
    ("model", None), ("model", 1), ("messages", None), ("messages", []), ("messages", "x"), ("messages", {}),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 0.5), ("max_tokens", 1e18), ("max_tokens", "1"),
    ("max_tokens", 10**18), ("temperature", -1), ("temperature", 3), ("temperature", "x"), ("top_p", 0),
    ("top_p", 2), ("top_k", 1.5), ("top_k", 9999999), ("n", 0), ("n", -1), ("n", 129), ("n", "2"),
    ("seed", 1.5), ("stop", 1), ("stop", [""] ), ("stream", "true"), ("logprobs", 3), ("top_logprobs", 2),
    ("logit_bias", {"1": 101}), ("tools", [{}]), ("response_format", {"type": "xml"}),
    ("stream_options", {"include_usage": True}), ("best_of", 2), ("presence_penalty", 3), ("ignore_eos", 1),
]  # fmt: skip
BAD_PROMPTS: list[Any] = [None, "", [], [""], [[]], ["a", 1], [-1], [320], {"a": 1}, 5, True]
MALFORMED: list[tuple[str, Any, str | None]] = [
    *[(CHAT, chat() | {name: value}, name) for name, value in BAD_FIELDS],
    *[("/v1/completions", {"model": "toy", "prompt": value}, "prompt") for value in BAD_PROMPTS],
    (CHAT, chat(messages=[{"role": "user", "content": None}]), "messages[0].content"),
    (CHAT, chat(messages=[{"role": "king", "content": "x"}]), "messages[0].role"),
    (CHAT, b"", None),
    (CHAT, b"{", None),
    (CHAT, b"[]", None),
    (CHAT, b'{"model":"toy","messages":[{"role":"user","content":"\\ud800"}]}', "messages[0].content"),
    (CHAT, b'{"model":"toy","temperature":NaN}', "temperature"),
    (CHAT, b"\xff\xfe", None),
]


async def test_malformed_requests_are_refused_by_name_and_harm_nobody(
    cluster: FakeCluster,
) -> None:
    assert len(MALFORMED) >= 40
    for path, body, param in MALFORMED:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await cluster.http.post(path, content=content)
        assert response.status_code == 400, (body, response.text)
        error = response.json()["error"]
        found = error["param"] or ""
        assert found == (param or "") or re.match(rf"{param}[.\[]", found), (body, error)
        assert param is None or param in error["message"], (body, error)
        assert error["type"] == "invalid_request_error"
    good = await cluster.http.post(CHAT, json=chat())
    assert good.json()["choices"][0]["message"]["content"] == "ok"
    assert not cluster.conductor.placed[:-1], "a malformed request reached the conductor"
    await cluster.idle()
    assert cluster.sample("tsukimi_requests_ended_total", outcome="rejected") == len(MALFORMED)


async def test_a_large_body_names_the_limit(cluster: FakeCluster) -> None:
    for size in (1 << 21, 40 << 20):
        try:
            response = await cluster.http.post(CHAT, content=b" " * size)
        except httpx.HTTPError:
            assert size > 1 << 24  # beyond what is read for politeness
            continue
        assert response.status_code == 413
        assert "1048576" in response.json()["error"]["message"]
    assert (await cluster.http.post(CHAT, json=chat())).status_code == 200


async def test_a_prompt_beyond_max_payload_names_both_sizes(cluster: FakeCluster) -> None:
    response = await cluster.http.post("/v1/completions", json={"model": "toy", "prompt": "x" * 400_000})
    assert response.status_code == 413
    message = response.json()["error"]["message"]
    assert "1048576" in message
    assert len(re.findall(r"\d{7}", message)) == 2
    assert (await cluster.http.post(CHAT, json=chat())).status_code == 200


async def test_unknown_paths_and_methods(cluster: FakeCluster) -> None:
    assert (await cluster.http.get("/nope")).json()["error"]["code"] == "not_found"
    assert (await cluster.http.get(CHAT)).status_code == 405
    assert (await cluster.http.post("/v1/models")).json()["error"]["code"] == "method_not_allowed"
    assert (await cluster.http.get("/v1/stream")).status_code == 426


async def test_request_ids_are_kept_or_made(cluster: FakeCluster) -> None:
    response = await cluster.http.post(CHAT, json=chat(), headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    for bad in ("x" * 1000, "a\tb"):
        response = await cluster.http.post(CHAT, json=chat(), headers={"x-request-id": bad})
        assert len(response.headers["x-request-id"]) == 36
    response = await cluster.http.post(CHAT, json={}, headers={"x-request-id": "mine-2"})
    assert response.headers["x-request-id"] == "mine-2"


async def test_overload_tells_when_to_come_back(cluster: FakeCluster) -> None:
    cluster.conductor.refuse = BUSY
    response = await cluster.http.post(CHAT, json=chat(stream=True))
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["type"] == "rate_limit_error"


async def test_more_requests_than_allowed_are_refused_at_once(cluster: FakeCluster) -> None:
    cluster.slow_down(0.2)
    busy = [asyncio.create_task(cluster.http.post(CHAT, json=chat())) for _ in range(4)]
    await until(lambda: cluster.gateway.choices_running == 4)
    assert (await cluster.http.post(CHAT, json=chat())).status_code == 429
    assert {(await task).status_code for task in busy} == {200}


# -- the rest --------------------------------------------------------------------------------------------------------


async def test_ready_means_that_a_request_would_find_its_way(cluster: FakeCluster) -> None:
    assert (await cluster.http.get("/live")).status_code == 200
    assert (await cluster.http.get("/ready")).status_code == 200
    await cluster.decodes[0].announce("draining")
    await until(lambda: cluster.gateway.missing())
    response = await cluster.http.get("/ready")
    assert response.status_code == 503
    assert response.json()["missing"] == ["decode: draining"]
    assert (await cluster.http.get("/live")).status_code == 200


async def test_before_a_model_is_announced_requests_are_told_to_come_back(cluster: FakeCluster) -> None:
    cluster.gateway.cluster.models.clear()
    response = await cluster.http.post(CHAT, json=chat())
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1


async def test_drain_ends_what_runs_and_takes_nothing_new(cluster: FakeCluster) -> None:
    cluster.slow_down(0.05)
    running = asyncio.create_task(cluster.http.post(CHAT, json=chat("<<say:until the end>>")))
    await until(lambda: cluster.gateway.choices_running)
    draining = asyncio.create_task(cluster.app.drain(20.0))
    await until(lambda: cluster.gateway.draining)
    assert (await cluster.http.post(CHAT, json=chat())).status_code == 503
    assert (await cluster.http.get("/ready")).status_code == 503
    assert (await running).json()["choices"][0]["message"]["content"] == "until the end"
    await draining


async def test_drain_tells_those_whose_time_is_up(cluster: FakeCluster) -> None:
    cluster.slow_down(0.05)
    running = asyncio.create_task(lines(cluster, chat("for ever", stream=True)))
    await until(lambda: cluster.decodes[0].work)
    await cluster.app.drain(1.1)
    assert events(await running)[-1]["error"]["code"] == "unavailable"


async def test_every_request_is_counted_once(cluster: FakeCluster) -> None:
    metrics = cluster.gateway.metrics
    await cluster.http.post(CHAT, json=chat())
    await cluster.http.post(CHAT, json=chat("<<fail:1>>"))
    await cluster.http.post(CHAT, json={})
    cluster.conductor.refuse = Unavailable("gone")
    waiting = asyncio.create_task(cluster.http.post(CHAT, json=chat()))
    await until(lambda: cluster.gateway.running)
    metrics.check()
    waiting.cancel()
    await cluster.idle()
    counted = {
        o: metrics.value("tsukimi_requests_ended_total", outcome=o)
        for o in ("ok", "error", "rejected", "aborted")
    }
    assert counted == {"ok": 1, "error": 1, "rejected": 1, "aborted": 1}
    text = (await cluster.http.get("/metrics")).text
    assert 'tsukimi_worker_steps_total{node="decode-0",role="decode"} 7.0' in text
    assert 'tsukimi_node_up{node="prefill-0",role="prefill"} 1.0' in text


async def test_small_writes_leave_at_once(cluster: FakeCluster) -> None:
    """TCP_NODELAY on accepted connections: no 40 ms stall of first tokens."""
    host, port = cluster.app.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readline()
    for connection in cluster.app._server.server_state.connections:
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()


async def test_token_ids_are_told_when_asked_for(cluster: FakeCluster) -> None:
    body = chat("<<say:é>>", return_token_ids=True)
    answer = (await cluster.http.post(CHAT, json=body)).json()
    assert answer["choices"][0]["token_ids"] == [0xC3, 0xA9, 257]
    assert answer["prompt_token_ids"][0] == 258
    said = events(await lines(cluster, body | {"stream": True}))
    assert [i for e in said for i in e["choices"][0].get("token_ids", [])] == [0xC3, 0xA9, 257]
    plain = {"model": "toy", "prompt": "ab", "max_tokens": 3, "return_token_ids": True}
    choice = (await cluster.http.post("/v1/completions", json=plain)).json()["choices"][0]
    assert choice["prompt_token_ids"] == [97, 98]
    assert bytes(choice["token_ids"]).decode() == choice["text"]


async def test_the_only_model_need_not_be_named(cluster: FakeCluster) -> None:
    body = chat()
    del body["model"]
    assert (await cluster.http.post(CHAT, json=body)).json()["model"] == "toy"
