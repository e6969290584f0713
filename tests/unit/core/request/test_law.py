"""The law of the request machine: whatever is lost, doubled, reordered or killed, every token comes once and in order."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.request import events as ev
from tests.support.worlds.request_world import EOS, World, answer_of, choice_spec


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    most=st.integers(1, 12),
    prompt=st.integers(1, 9),
    eos_at=st.none() | st.integers(0, 11),
    steps=st.integers(0, 120),
)
def test_whatever_happens_every_token_comes_once_and_in_order(
    seed: int, most: int, prompt: int, eos_at: int | None, steps: int
) -> None:
    spec = choice_spec(prompt, most)
    answer = answer_of(spec, eos_at)
    world = World(
        random.Random(seed),
        spec,
        answer,
        ev.LifecycleConfig(budget_s=1e6, losses_most=10**6, overloads_most=10**6),
    )
    world.feed(ev.Started())
    for _ in range(steps):
        world.chaos()
    world.calm()
    assert world.delivered == answer
    assert world.logprobs == len(answer)
    [end] = world.ended
    assert isinstance(end, ev.Finish)
    assert end.completion_tokens == len(answer)
    assert end.reason == ("stop" if answer[-1] == EOS else "length")
    assert 0 <= end.cached_tokens < prompt


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 60), budget_s=st.floats(0.1, 5))
def test_with_little_time_it_ends_once_too(seed: int, steps: int, budget_s: float) -> None:
    spec = choice_spec()
    answer = answer_of(spec, None)
    world = World(
        random.Random(seed),
        spec,
        answer,
        ev.LifecycleConfig(budget_s=budget_s, losses_most=2, overloads_most=1),
    )
    world.feed(ev.Started())
    for _ in range(steps):
        world.chaos()
    world.calm()
    assert len(world.ended) == 1
    assert world.delivered == answer[: len(world.delivered)]
