"""One request of a load test, timed by the arrival of its bytes."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import httpx
from msgspec import Struct

from tsukimi.client import Failed, Outcome, refused, take, unreachable
from tsukimi.traffic.settings import Load, Prompt


class Sample(Struct, frozen=True):
    """What one request got. All times are this client's."""

    number: int
    due_s: float
    """When it was due, in seconds from the start of the run: its arrival time, or its client's turn in a closed loop."""
    sent_s: float
    seconds: float
    """Seconds from sending to the end of the answer."""
    ttft_s: float | None = None
    """Seconds from sending to the first chunk with text."""
    gaps_s: tuple[float, ...] = ()
    """Seconds from each chunk with text to the next, however many tokens a chunk has."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    """From the server's `usage`; 0 if it sends none."""
    finish: str = ""
    reason: str = ""
    """Why it failed, in a few words that are equal for failures of one kind; empty if it did not fail."""
    error: str = ""

    @property
    def chunks(self) -> int:
        return 0 if self.ttft_s is None else 1 + len(self.gaps_s)

    @property
    def tokens(self) -> int:
        """Tokens of the answer. A server that does not count them is assumed to send one in each chunk."""
        return self.completion_tokens or self.chunks


async def ask(
    http: httpx.AsyncClient,
    load: Load,
    prompt: Prompt,
    number: int,
    due_s: float,
    start: float,
    output_tokens: int = 0,
) -> Sample:
    """Send one request. A failure of the request is not raised: it is in the sample. `start` is when the run began.
    `output_tokens`: other than the load's; 0: the load's."""
    outcome = Outcome()
    stamps: list[float] = []
    sent = time.perf_counter()
    failure: Failed | None = None
    try:
        await _stream(http, load.path, load.body(prompt, output_tokens), outcome, stamps)
        if not stamps:
            raise Failed("no text", "the answer has no text.")
        if not outcome.whole:
            raise Failed("cut short", "the answer broke off.")
    except httpx.HTTPError as e:
        failure = unreachable(str(http.base_url).rstrip("/"), e)
    except Failed as e:
        failure = e
    ended = time.perf_counter()
    return Sample(
        number=number,
        due_s=due_s,
        sent_s=sent - start,
        seconds=ended - sent,
        ttft_s=stamps[0] - sent if stamps else None,
        gaps_s=tuple(b - a for a, b in pairwise(stamps)),
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        completion_tokens=outcome.completion_tokens,
        finish=outcome.finish,
        reason=failure.reason if failure else "",
        error=failure.message if failure else "",
    )


async def _stream(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], outcome: Outcome, stamps: list[float]
) -> None:
    """Events that came in one read get the same time."""
    async with http.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            raise refused(response)
        rest = b""
        async for piece in response.aiter_bytes():
            now = time.perf_counter()
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and take(line[5:], outcome):
                    stamps.append(now)
