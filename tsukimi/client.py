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
"""Longest wait for the next piece; the gateway's keep-alives come far more often."""


class Outcome(Struct):
    """What is known of an answer when it has ended. Times are of this client, from the sending of the request."""

    ttft_s: float | None = None
    """To the first piece with text."""
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens after the first."""
        if self.ttft_s is None or self.completion_tokens < 2 or self.seconds <= self.ttft_s:
            return None
        return (self.completion_tokens - 1) / (self.seconds - self.ttft_s)


class Client:
    """One connection pool to one gateway. Every method raises ToolError with what the gateway said."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url, timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S), trust_env=False
        )

    def close(self) -> None:
        self._http.close()

    def first_model(self) -> str:
        try:
            response = self._http.get("/v1/models")
        except httpx.HTTPError as e:
            raise self._unreachable(e) from e
        if response.status_code != 200:
            raise ToolError(_what_it_said(response))
        models = [m["id"] for m in response.json()["data"]]
        if not models:
            raise ToolError(f"the gateway at {self.url} serves no model yet; see `tsukimi status`.")
        return str(models[0])

    def stream(self, path: str, body: dict[str, Any], outcome: Outcome) -> Iterator[str]:
        """What a generation path answers, piece by piece; `outcome` is complete at its end. Closing it cancels."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        began = time.perf_counter()
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ToolError(_what_it_said(response))
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        text = _take(json.loads(line[6:]), outcome)
                        if text and outcome.ttft_s is None:
                            outcome.ttft_s = time.perf_counter() - began
                        if text:
                            yield text
        except httpx.HTTPError as e:
            raise self._unreachable(e) from e
        finally:
            outcome.seconds = time.perf_counter() - began

    def _unreachable(self, error: httpx.HTTPError) -> ToolError:
        if isinstance(error, httpx.ConnectError):
            return ToolError(f"nobody answers at {self.url}; is a cluster up? Start one with `tsukimi up`.")
        return ToolError(f"the connection to {self.url} broke: {error or type(error).__name__}.")


def _take(chunk: dict[str, Any], outcome: Outcome) -> str:
    if "error" in chunk:
        raise ToolError(f"the gateway ended the answer: {chunk['error'].get('message', chunk['error'])}")
    usage = chunk.get("usage")
    if usage:
        outcome.prompt_tokens = usage["prompt_tokens"]
        outcome.completion_tokens = usage["completion_tokens"]
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    text = ""
    for choice in chunk.get("choices", ()):
        text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        outcome.finish = choice.get("finish_reason") or outcome.finish
    return text


def _what_it_said(response: httpx.Response) -> str:
    try:
        said = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = response.text[:200]
    return f"the gateway answered {response.status_code}: {said}"
