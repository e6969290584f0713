"""Stop strings: nothing of one leaks, however the text arrives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.generation.stop import StopFinder

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def told(finder: StopFinder, pieces: list[str]) -> list[str]:
    out = []
    for piece in pieces:
        out.append(finder.push(piece))
        if finder.met:
            return out
    return [*out, finder.finish()]


def expected(text: str, stops: list[str]) -> str:
    """The answer ends with the first character that completes a stop string."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


def test_the_start_of_a_stop_string_does_not_leak() -> None:
    finder = StopFinder(["DEFGHIJ"])
    assert told(finder, list(ALPHABET)) == ["A", "B", "C", "", "", "", "", "", "", ""]
    assert finder.met


def test_a_stop_string_over_token_boundaries_is_removed() -> None:
    assert "".join(told(StopFinder(["cd"]), ["abc", "def"])) == "ab"
    assert "".join(told(StopFinder(["😀"]), ["x", "😀", "y"])) == "x"


def test_what_was_no_stop_string_after_all_comes_later() -> None:
    assert told(StopFinder(["abX"]), ["a", "b", "c", "a"]) == ["", "", "abc", "", "a"]


def test_the_earliest_of_several_counts() -> None:
    assert "".join(told(StopFinder(["longer", "on"]), ["a long", "er"])) == "a l"


@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_letter_by_letter_it_is_the_first_complete_one(text: str, stops: list[str]) -> None:
    assert "".join(told(StopFinder(stops), list(text))) == expected(text, stops)


@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=10),
    stop=st.text(alphabet="abc", min_size=1, max_size=4),
)
def test_no_byte_of_a_stop_string_is_told_in_any_grouping(pieces: list[str], stop: str) -> None:
    text = "".join(pieces)
    assert "".join(told(StopFinder([stop]), pieces)) == text.split(stop, 1)[0]
