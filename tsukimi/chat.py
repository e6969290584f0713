"""`tsukimi chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

import readline
from typing import Any

from rich.console import Console
from rich.text import Text

from tsukimi.client import Client, Outcome
from tsukimi.errors import ToolError

HELP = "/reset starts over, /quit leaves; Ctrl-C stops an answer."


class Chat:
    """One conversation. `say` adds a turn. An answer that was cut short stays in it, as far as it got."""

    def __init__(self, client: Client, model: str, system: str, options: dict[str, Any]) -> None:
        self._client = client
        self._model = model
        self._system = system
        self._options = options
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str, console: Console) -> Outcome:
        """Ask, and print the answer as it comes. If it raises ToolError, the turn is not in the conversation."""
        self.messages.append({"role": "user", "content": text})
        outcome = Outcome()
        answer = ""
        pieces = self._client.stream(
            "/v1/chat/completions",
            {"model": self._model, "messages": self.messages, **self._options},
            outcome,
        )
        try:
            for piece in pieces:
                answer += piece
                console.out(piece, end="", highlight=False)
        except ToolError:
            self.messages.pop()
            raise
        except KeyboardInterrupt:
            outcome.finish = "stopped"
        finally:
            pieces.close()  # type: ignore[attr-defined]
            console.out("")
        self.messages.append({"role": "assistant", "content": answer})
        return outcome


def describe(outcome: Outcome) -> str:
    parts = []
    if outcome.ttft_s is not None:
        parts.append(f"first token after {outcome.ttft_s:.2f} s")
    if outcome.tokens_per_s is not None:
        parts.append(f"{outcome.tokens_per_s:.1f} tokens/s")
    if outcome.prompt_tokens:
        parts.append(f"{outcome.cached_tokens} of {outcome.prompt_tokens} prompt tokens from the cache")
    if outcome.finish not in ("stop", ""):
        parts.append({"length": "cut at the token limit"}.get(outcome.finish, outcome.finish))
    return " · ".join(parts)


def repl(chat: Chat, console: Console) -> None:
    """Converse until /quit or the end of the input."""
    readline.set_history_length(1000)
    console.print(Text(HELP, style="dim"))
    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            console.out("")
            continue
        except EOFError:
            console.out("")
            return
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            chat.reset()
            console.print(Text("A new conversation.", style="dim"))
        elif line.startswith("/"):
            console.print(Text(HELP, style="dim"))
        elif line:
            try:
                console.print(Text(describe(chat.say(line, console)), style="dim"), soft_wrap=True)
            except ToolError as e:
                console.print(Text(e.message, style="red"), soft_wrap=True)
