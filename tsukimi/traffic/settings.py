"""What load to put on which model."""

from __future__ import annotations

import random
from typing import Any

from msgspec import Struct

Prompt = str | list[int]
"""Text, or token ids."""


class Load(Struct, frozen=True, kw_only=True):
    """`rate` 0 is a closed loop: each of `concurrency` clients waits for its answer before it asks again. Else it is an
    open loop: requests are sent at their own times, however many are unanswered."""

    model: str
    requests: int = 64
    input_tokens: int = 256
    output_tokens: int = 64
    concurrency: int = 4
    rate: float = 0.0
    """Requests a second, as a Poisson process."""
    seed: int = 0
    """Seed of the arrival times."""
    warmup: int = 1
    chat: bool = False
    ignore_eos: bool = False
    ttft_slo_s: float = 0.0
    tbt_slo_s: float = 0.0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, prompt: Prompt, output_tokens: int = 0) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output_tokens or self.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.ignore_eos:  # not in OpenAI's API: only sent when asked for
            body["ignore_eos"] = True
        return body


def arrivals(rate: float, requests: int, seed: int) -> list[float]:
    """When each request is sent, in seconds from the start: the first at 0, then a Poisson process. Deterministic."""
    rng = random.Random(seed)
    times, at = [], 0.0
    for _ in range(requests):
        times.append(at)
        at += rng.expovariate(rate)
    return times
