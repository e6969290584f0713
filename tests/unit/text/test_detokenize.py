"""Detokenizing as tokens come gives the text of all of them at once, in whole characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.text.detokenize import REPLACEMENT, ByteDetokenizer, Detokenizer, WindowDetokenizer
from shared.text.toy_text import token_bytes

TEXTS = st.text(alphabet=st.sampled_from("ab é漢字😀👩‍👩‍👧 \n"), max_size=20)


def window() -> WindowDetokenizer:
    return WindowDetokenizer(lambda ids: bytes(ids).decode("utf-8", "replace"))


def pieces(d: Detokenizer, ids: bytes) -> list[str]:
    return [*(d.push(i) for i in ids), d.finish()]


def test_an_emoji_in_four_tokens_comes_whole() -> None:
    for d in (ByteDetokenizer(token_bytes), window()):
        assert pieces(d, "a😀b".encode()) == ["a", "", "", "", "😀", "b", ""]


def test_a_stream_that_ends_inside_a_character_ends_with_one_mark() -> None:
    for d in (ByteDetokenizer(token_bytes), window()):
        assert "".join(pieces(d, "漢😀".encode()[:-1])) == "漢" + REPLACEMENT


def test_special_tokens_have_no_text() -> None:
    d = ByteDetokenizer(token_bytes)
    assert [d.push(i) for i in (256, 65, 257, 66)] == ["", "A", "", "B"]


@given(TEXTS)
def test_pieces_join_to_the_text(text: str) -> None:
    for d in (ByteDetokenizer(token_bytes), window()):
        got = pieces(d, text.encode())
        assert "".join(got) == text
        assert not any(REPLACEMENT in piece for piece in got)


@given(st.binary(max_size=40))
def test_any_bytes_give_what_decoding_them_at_once_gives(data: bytes) -> None:
    assert "".join(pieces(ByteDetokenizer(token_bytes), data)) == data.decode("utf-8", "replace")


@given(st.binary(max_size=40))
def test_the_window_never_waits_for_more_than_a_character(data: bytes) -> None:
    d = window()
    for i in data:
        d.push(i)
        assert len(d._tokens) - d._told < 4
