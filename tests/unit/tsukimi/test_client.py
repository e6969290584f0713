from __future__ import annotations

import pytest

from tests.unit.tsukimi.gateway_double import gateway_double, text_chunks
from tsukimi.client import Client, Outcome
from tsukimi.errors import ToolError

CHAT = "/v1/chat/completions"


def test_text_usage_and_end_of_a_stream() -> None:
    with gateway_double() as gateway:
        gateway.chunks = text_chunks("Pa", "ris", ".")
        client, outcome = Client(gateway.url), Outcome()
        assert list(client.stream(CHAT, {"model": "toy", "messages": []}, outcome)) == ["Pa", "ris", "."]
        client.close()
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens) == (40, 32, 3)
    assert outcome.finish == "stop"
    assert outcome.ttft_s is not None
    assert outcome.ttft_s <= outcome.seconds
    assert gateway.bodies[0]["stream_options"] == {"include_usage": True}


def test_a_chunk_without_text_is_not_the_first_token() -> None:
    with gateway_double() as gateway:
        gateway.chunks = text_chunks()
        client, outcome = Client(gateway.url), Outcome()
        assert list(client.stream(CHAT, {}, outcome)) == []
        client.close()
    assert outcome.ttft_s is None


def test_a_refusal_is_said_in_the_gateways_words() -> None:
    with gateway_double() as gateway:
        gateway.status = 429
        client = Client(gateway.url)
        with pytest.raises(ToolError, match="429: try later"):
            list(client.stream(CHAT, {}, Outcome()))
        client.close()


def test_an_error_in_the_stream_is_an_error() -> None:
    with gateway_double() as gateway:
        gateway.chunks = [*text_chunks("Pa")[:2], {"error": {"message": "lost it"}}]
        client = Client(gateway.url)
        with pytest.raises(ToolError, match="lost it"):
            list(client.stream(CHAT, {}, Outcome()))
        client.close()


def test_nobody_there_is_said() -> None:
    client = Client("http://127.0.0.1:1")
    with pytest.raises(ToolError, match="is a cluster up"):
        client.first_model()
    client.close()


def test_speed_is_of_the_tokens_after_the_first() -> None:
    assert Outcome(ttft_s=1.0, seconds=3.0, completion_tokens=21).tokens_per_s == 10.0
    assert Outcome(ttft_s=1.0, seconds=1.0, completion_tokens=1).tokens_per_s is None
