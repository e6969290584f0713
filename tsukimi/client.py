"""The gateway as the toolbox sees it: streams of text over HTTP, timed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
from msgspec import Struct

from tsukimi.errors import ToolError

CONNECT_S = 5.0
SILENCE_S = 120.0
"""Longest wait for the next piece, in seconds. The gateway's signs of life come far more often."""


class Outcome(Struct):
    """What is known of an answer when it has ended. Times are this client's, from when the request was sent."""

    ttft_s: float | None = None
    """To the first piece with text."""
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish: str = ""
    whole: bool = False
    """Whether the answer ended regularly and was not cut short."""

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens after the first."""
        if self.ttft_s is None or self.completion_tokens < 2 or self.seconds <= self.ttft_s:
            return None
        return (self.completion_tokens - 1) / (self.seconds - self.ttft_s)


class Failed(ToolError):
    """A request did not get a whole answer."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """Names the kind of failure: a status and code, or what happened to the connection."""


class Client:
    """One connection pool to one gateway or similar server. Every method raises ToolError with the server's message."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url
        try:
            self._http = httpx.Client(**http_options(url, api_key))
        except httpx.InvalidURL as e:
            raise ToolError(f"{url!r} is no address: {e}.") from e

    def close(self) -> None:
        self._http.close()

    def first_model(self) -> str:
        try:
            response = self._http.get("/v1/models")
        except httpx.HTTPError as e:
            raise unreachable(self.url, e) from e
        if response.status_code != 200:
            raise refused(response)
        try:
            models = [m["id"] for m in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as e:
            raise ToolError(f"what answers at {self.url} does not speak the OpenAI API.") from e
        if not models:
            raise ToolError(f"the gateway at {self.url} serves no model yet; see `tsukimi status`.")
        return str(models[0])

    def stream(self, path: str, body: dict[str, Any], outcome: Outcome) -> Iterator[str]:
        """Yields the answer of a generation path piece by piece. `outcome` is complete at its end. Closing it cancels."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        began = time.perf_counter()
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise refused(response)
                for line in response.iter_lines():
                    if line.startswith("data:"):
                        text = take(line[5:], outcome)
                        if text and outcome.ttft_s is None:
                            outcome.ttft_s = time.perf_counter() - began
                        if text:
                            yield text
        except httpx.HTTPError as e:
            raise unreachable(self.url, e) from e
        finally:
            outcome.seconds = time.perf_counter() - began


def http_options(url: str, api_key: str) -> dict[str, Any]:
    """Settings of httpx's clients here, blocking or not."""
    return {
        "base_url": url,
        "timeout": httpx.Timeout(SILENCE_S, connect=CONNECT_S),
        "trust_env": False,
        "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
    }


def take(data: str | bytes, outcome: Outcome) -> str:
    """Return the text of one event of a stream and put the rest into `outcome`. Raises Failed for an error."""
    data = data.strip()
    if data in ("[DONE]", b"[DONE]"):
        outcome.whole = True
        return ""
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise _ended(chunk["error"])
        return _take_chunk(chunk, outcome)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise Failed("malformed", f"the answer has a part that is none: {data[:200]!r}.") from e


def _take_chunk(chunk: dict[str, Any], outcome: Outcome) -> str:
    usage = chunk.get("usage")
    if usage:
        outcome.prompt_tokens = usage["prompt_tokens"]
        outcome.completion_tokens = usage["completion_tokens"]
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    text = ""
    for choice in chunk.get("choices", ()):
        text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        outcome.finish = choice.get("finish_reason") or outcome.finish
    outcome.whole = outcome.whole or bool(outcome.finish)
    return text


def _ended(error: Any) -> Failed:
    kind, message = _kind_and_message(error)
    return Failed(f"in the answer: {kind}", f"the gateway ended the answer: {message}")


def refused(response: httpx.Response) -> Failed:
    """The error in a response other than 200 that has been read whole."""
    try:
        kind, message = _kind_and_message(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        kind, message = response.reason_phrase, response.text[:200]
    status = response.status_code
    return Failed(f"{status} {kind}".strip(), f"the gateway answered {status}: {message}")


def _kind_and_message(error: Any) -> tuple[str, str]:
    if not isinstance(error, dict):
        return "", str(error)
    code = error.get("code")
    kind = code if isinstance(code, str) else error.get("type")
    return str(kind or ""), str(error.get("message", error))


def unreachable(url: str, error: httpx.HTTPError) -> Failed:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return Failed(
            "unreachable", f"nobody answers at {url}; is a cluster up? Start one with `tsukimi up`."
        )
    reason = "silent" if isinstance(error, httpx.TimeoutException) else "the connection broke"
    return Failed(reason, f"the connection to {url} broke: {error or type(error).__name__}.")
