from __future__ import annotations

import re
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.io.memory_bus import matches
from shared.protocol import subjects
from shared.protocol.ids import Role

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
PER_NODE: list[Callable[[str], str]] = [
    subjects.blocks, subjects.snapshot, subjects.prefill, subjects.reserve, subjects.cancel, subjects.sync,
    subjects.tokens,
]  # fmt: skip


def undo(token: str) -> str:
    raw = re.sub(rb"=([0-9a-f]{2})", lambda m: bytes([int(m[1], 16)]), token.encode())
    return raw.decode()


@given(names)
def test_a_name_becomes_one_safe_token_and_can_be_told_back(name: str) -> None:
    token = subjects.encode(name)
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", token)
    assert undo(token) == name


@given(names, names)
def test_different_names_never_share_a_subject(a: str, b: str) -> None:
    for subject in PER_NODE:
        assert (subject(a) == subject(b)) is (a == b)


@given(names)
def test_no_name_reaches_another_subject(name: str) -> None:
    every = [subject(name) for subject in PER_NODE] + [
        subjects.heartbeat(role, name) for role in get_args(Role)
    ]
    assert len(set(every)) == len(every)
    assert matches(subjects.BLOCKS_ALL, subjects.blocks(name))
    for role in get_args(Role):
        assert matches(subjects.HEARTBEAT_ALL, subjects.heartbeat(role, name))
        assert matches(subjects.heartbeats_of(role), subjects.heartbeat(role, name))


def test_usual_names_stay_readable() -> None:
    assert subjects.tokens("gateway-0") == "tsukimi.v1.gateway.gateway-0.tokens"
    assert subjects.encode("a.b *>=") == "a=2eb=20=2a=3e=3d"


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        subjects.encode("")
