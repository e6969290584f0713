from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.core.conductor.questions.delays import FORGET_S, MOST_ASKERS, WINDOW_S, Delays


def test_whatever_the_clocks_say_what_took_longer_than_the_shortest_way_waited() -> None:
    for ahead_s in (0.0, -1e6, 1e6):
        delays = Delays()
        assert delays.delay_s("g", 10.0 + ahead_s, 10.001) == 0.0
        assert delays.delay_s("g", 11.0 + ahead_s, 11.001) < 1e-6
        assert abs(delays.delay_s("g", 12.0 + ahead_s, 19.001) - 7.0) < 1e-6
        assert delays.delay_s("g", 20.0 + ahead_s, 20.0005) == 0.0


def test_the_first_question_of_an_asker_may_be_late_and_passes() -> None:
    delays = Delays()
    assert delays.delay_s("g", 0.0, 9.0) == 0.0
    assert delays.delay_s("g", 8.0, 9.0) == 0.0, "now it is known that the first one was late"
    assert delays.delay_s("g", 2.0, 9.0) == 6.0


def test_each_asker_has_a_clock_of_its_own() -> None:
    delays = Delays()
    delays.delay_s("g", 1000.0, 10.0)
    assert delays.delay_s("h", 5.0, 10.0) == 0.0
    assert delays.delay_s("g", 1002.0, 15.0) == 3.0


def test_a_long_pause_of_ours_is_noticed_by_what_was_seen_before_it() -> None:
    delays = Delays()
    delays.delay_s("g", 0.0, 0.0)
    for asked_at_s in range(1, 200):
        assert delays.delay_s("g", float(asked_at_s), 200.0) == 200.0 - asked_at_s


def test_an_asker_whose_clock_stood_still_is_late_only_for_a_while() -> None:
    delays = Delays()
    asked = [delays.delay_s("g", now - (40.0 if now > 100 else 0.0), float(now)) for now in range(300)]
    assert asked[:101] == [0.0] * 101
    late = [now for now, delay_s in enumerate(asked) if delay_s]
    assert 0 < len(late) <= 2 * WINDOW_S + 2
    assert late == list(range(late[0], late[-1] + 1))


def test_after_a_long_silence_the_clocks_are_compared_anew() -> None:
    delays = Delays()
    delays.delay_s("g", 0.0, 0.0)
    assert delays.delay_s("g", FORGET_S - 1.0, FORGET_S + 1.0) == 0.0


def test_few_askers_are_remembered() -> None:
    delays = Delays()
    for i in range(3 * MOST_ASKERS):
        delays.delay_s(f"g{i}", 0.0, 1.0)
        delays.delay_s("faithful", 0.0, 1.0)
    assert len(delays) == MOST_ASKERS
    assert delays.delay_s("faithful", 0.0, 2.0) == 1.0


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 20.0)), min_size=1, max_size=40),
    st.floats(-1e5, 1e5),
)
def test_no_question_seems_later_than_it_is(asked: list[tuple[float, float]], ahead_s: float) -> None:
    delays, now = Delays(), 0.0
    for pause_s, delay_s in asked:
        now += pause_s
        assert -1e-6 <= delays.delay_s("g", now - delay_s + ahead_s, now) <= delay_s + 1e-6
