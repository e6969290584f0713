from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.unit.tsukimi.gateway_double import gateway_double, text_chunks
from tsukimi.chat import Chat, describe, repl
from tsukimi.client import Client, Outcome
from tsukimi.errors import ToolError


def test_a_conversation_grows_and_resets() -> None:
    out = io.StringIO()
    console = Console(file=out)
    with gateway_double() as gateway:
        gateway.chunks = text_chunks("Par", "is")
        client = Client(gateway.url)
        chat = Chat(client, "toy", "Be brief.", {"max_tokens": 5})
        chat.say("Capital of France?", console)
        chat.say("Sure?", console)
        client.close()
    roles = [m["role"] for m in gateway.bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert gateway.bodies[1]["messages"][2]["content"] == "Paris"
    assert gateway.bodies[0]["max_tokens"] == 5
    assert "Paris" in out.getvalue()
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]


def test_a_refused_turn_has_not_happened() -> None:
    with gateway_double() as gateway:
        gateway.status = 429
        client = Client(gateway.url)
        chat = Chat(client, "toy", "", {})
        with pytest.raises(ToolError):
            chat.say("Hello", Console(file=io.StringIO()))
        client.close()
    assert chat.messages == []


def test_the_loop_takes_commands_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    lines = iter(["", "/what", "hello", "/reset", "/quit", "never read"])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    with gateway_double() as gateway:
        gateway.chunks = text_chunks("hi")
        client = Client(gateway.url)
        chat = Chat(client, "toy", "", {})
        repl(chat, Console(file=out, width=200))
        client.close()
    assert chat.messages == []
    assert "32 of 40 prompt tokens from the cache" in out.getvalue()
    assert next(lines) == "never read"


def test_an_answer_is_described() -> None:
    outcome = Outcome(0.25, 1.25, 40, 32, 11, "length")
    assert describe(outcome) == (
        "first token after 0.25 s · 10.0 tokens/s · 32 of 40 prompt tokens from the cache · cut at the token limit"
    )
