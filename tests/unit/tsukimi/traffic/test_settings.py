from __future__ import annotations

from tsukimi.traffic.settings import Load, arrivals


def test_arrivals_are_of_the_seed_and_the_rate() -> None:
    times = arrivals(5.0, 2000, seed=3)
    assert times == arrivals(5.0, 2000, seed=3)
    assert times != arrivals(5.0, 2000, seed=4)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[:10] == arrivals(5.0, 10, seed=3), "more requests change no earlier one"
    assert 0.19 < times[-1] / 1999 < 0.21


def test_twice_the_rate_is_the_same_arrivals_in_half_the_time() -> None:
    slow, fast = arrivals(1.0, 50, 7), arrivals(2.0, 50, 7)
    assert all(abs(a - 2 * b) < 1e-9 for a, b in zip(slow, fast, strict=True))


def test_only_what_was_asked_for_is_sent_to_a_peer() -> None:
    body = Load(model="m", output_tokens=9).body("hello")
    assert (body["prompt"], body["max_tokens"]) == ("hello", 9)
    assert "ignore_eos" not in body
    chat = Load(model="m", chat=True, ignore_eos=True)
    assert chat.path == "/v1/chat/completions"
    assert chat.body("hello")["messages"] == [{"role": "user", "content": "hello"}]
    assert chat.body("hello")["ignore_eos"] is True
