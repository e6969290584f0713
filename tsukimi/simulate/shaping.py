"""Changes to a trace's requests: other arrivals, shorter answers."""

from __future__ import annotations

from msgspec.structs import replace

from tsukimi.simulate.noise import exponential
from tsukimi.simulate.trace import TraceRequest


def with_poisson_arrivals(requests: list[TraceRequest], per_s: float, seed: int) -> list[TraceRequest]:
    """The same requests in the same order, arriving as a Poisson process from time 0 on. The same seed gives the same
    times."""
    draw = exponential(per_s, seed)
    at_s, found = 0.0, []
    for request in requests:
        found.append(replace(request, arrival_s=at_s))
        at_s += draw()
    return found


def with_most_output(requests: list[TraceRequest], tokens: int) -> list[TraceRequest]:
    """No answer is longer than that."""
    return [replace(r, output_tokens=min(r.output_tokens, tokens)) for r in requests]
